"""What kernels fuse: the output head with its loss, and dropout with the residual addition after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.bench.problem import Answer, Problem, Provider, Setup, Work, autograd_work, doubled, errors
from altup.kernels import head_sums, token_sums
from altup.kernels.dropout import dropout

Z_LOSS = 1e-4
P = 0.1  # of dropout
SPREADS = 5  # standard deviations of a binomial distribution: how far the share that is dropped may be off
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Drop = Callable[[Tensor, float], Tensor]


def head_problems(setup: Setup) -> Iterator[Problem]:
    """Output head, cross-entropy, z-loss and accuracy, for heads that read d and K·d columns."""
    tokens, vocabulary, widths = (24, 300, (16,)) if setup.quick else (64 * 114, 32128, (768, 1536))
    for d in widths:
        inputs = HeadInputs(setup, tokens, d, vocabulary)
        yield Problem(
            "head",
            {"tokens": tokens, "d": d, "vocabulary": vocabulary},
            [
                Provider("triton", partial(inputs.work, partial(fused, implementation="triton")), triton=True),
                Provider("plain eager", partial(inputs.work, plain), "plain"),
                Provider("plain compiled", partial(inputs.work, plain, compiled=True), "plain", compiled=True),
                Provider("matrix products", inputs.products, "floor"),
            ],
            baseline="plain compiled" if setup.compiles else "plain eager",
            tolerances={"": 2e-2 if setup.dtype == torch.bfloat16 else 1e-4},
        )


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return token_sums(F.linear(hidden, weight), labels, Z_LOSS).loss


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, implementation: str) -> Tensor:
    return head_sums(hidden, weight, labels, Z_LOSS, implementation=implementation).loss


class HeadInputs:
    """Logits are far larger than any cache, so one set of inputs is enough."""

    def __init__(self, setup: Setup, tokens: int, d: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        like = {"device": setup.device, "dtype": setup.dtype}
        self.hidden = torch.randn(tokens, d, **like).requires_grad_()  # type: ignore[call-overload]
        self.weight = (torch.randn(vocabulary, d, **like) * d**-0.5).requires_grad_()  # type: ignore[call-overload]
        self.labels = torch.randint(vocabulary, (tokens,), device=setup.device)
        self.reference = cache(self._reference)

    def work(self, loss: Loss, compiled: bool = False) -> Work:
        run = torch.compile(loss, dynamic=False) if compiled else loss

        return autograd_work(
            lambda: run(self.hidden, self.weight, self.labels),
            (self.hidden, self.weight),
            None,
            lambda loss, gradients: errors(_answer(loss, gradients), self.reference()),
            per_repetition=len(self.labels),
            unit="tokens/s",
        )

    def products(self) -> Work:
        """The three products of the head, which no fusion removes."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        logits = torch.randn(len(hidden), len(weight), device=hidden.device, dtype=hidden.dtype)
        return Work(lambda i: hidden @ weight.t(), lambda out: (logits @ weight, logits.t() @ hidden))

    def _reference(self) -> Answer:
        hidden, weight = doubled([self.hidden, self.weight])
        loss = plain(hidden, weight, self.labels)
        return _answer(loss, torch.autograd.grad(loss, (hidden, weight)))


def _answer(loss: Tensor, gradients: tuple[Tensor, ...]) -> Answer:
    return {"loss": loss, "hidden gradient": gradients[0], "weight gradient": gradients[1]}


def dropout_problems(setup: Setup) -> Iterator[Problem]:
    """Dropout before a residual addition, as layers have it, against the addition alone."""
    tokens = 64 if setup.quick else 64 * 512
    for d in (16,) if setup.quick else (768, 2048):
        inputs = DropoutInputs(setup, tokens, d)
        fused = partial(dropout, implementation="triton")
        compiled = setup.compiles
        yield Problem(
            "dropout",
            {"tokens": tokens, "d": d},
            [
                Provider("triton", partial(inputs.work, fused, compiled), triton=True, compiled=compiled),
                Provider("plain eager", partial(inputs.work, F.dropout), "plain"),
                Provider("plain compiled", partial(inputs.work, F.dropout, True), "plain", compiled=True),
                Provider("addition", partial(inputs.work, None, compiled), "floor", compiled=compiled),
            ],
            baseline="plain compiled" if compiled else "plain eager",
            tolerances={"": 2e-2 if setup.dtype == torch.bfloat16 else 1e-5, "share dropped": 1.0},
        )


class DropoutInputs:
    """What is dropped, what it is added to, and the gradient of the sum."""

    def __init__(self, setup: Setup, tokens: int, d: int) -> None:
        torch.manual_seed(0)
        self.x, self.residual, self.upstream = (
            torch.randn(tokens, d, device=setup.device, dtype=setup.dtype) for _ in range(3)
        )
        self.x.requires_grad_()

    def work(self, drop: Drop | None, compiled: bool = False) -> Work:
        def add(x: Tensor, residual: Tensor) -> Tensor:
            return residual + (x if drop is None else drop(x, P))

        run = torch.compile(add, dynamic=False) if compiled else add

        return autograd_work(
            lambda: run(self.x, self.residual),
            [self.x],
            self.upstream,
            (lambda out, gradients: self._errors(out.detach(), gradients[0])) if drop else None,
            per_repetition=len(self.x),
            unit="tokens/s",
        )

    def _errors(self, out: Tensor, gradient: Tensor) -> dict[str, float]:
        """Compare with what the gradient says was kept; the share dropped in units of what chance allows."""
        kept = gradient != 0
        want = self.residual + self.x.detach() * kept / (1 - P)
        spread = SPREADS * (P * (1 - P) / kept.numel()) ** 0.5
        return {
            "result": ((out - want).norm() / want.norm()).item(),
            "gradient": ((gradient - self.upstream * kept / (1 - P)).norm() / gradient.norm()).item(),
            "share dropped": abs(1 - kept.double().mean().item() - P) / spread,
        }
