"""Output head, cross-entropy, z-loss and accuracy, for heads that read d and K·d columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.bench.agreement import Answer, doubled, errors
from altup.bench.problem import Problem, Provider, Setup, Work
from altup.kernels import head_sums, token_sums

Z_LOSS = 1e-4
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def problems(setup: Setup) -> Iterator[Problem]:
    tokens, vocabulary, widths = (24, 300, (16,)) if setup.quick else (64 * 114, 32128, (768, 1536))
    for d in widths:
        inputs = Inputs(setup, tokens, d, vocabulary)
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


class Inputs:
    """One problem's inputs; logits are far larger than any cache, so one set is enough."""

    def __init__(self, setup: Setup, tokens: int, d: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        like = {"device": setup.device, "dtype": setup.dtype}
        self.hidden = torch.randn(tokens, d, **like).requires_grad_()  # type: ignore[call-overload]
        self.weight = (torch.randn(vocabulary, d, **like) * d**-0.5).requires_grad_()  # type: ignore[call-overload]
        self.labels = torch.randint(vocabulary, (tokens,), device=setup.device)
        self.reference = cache(self._reference)

    def work(self, loss: Loss, compiled: bool = False) -> Work:
        run = torch.compile(loss, dynamic=False) if compiled else loss

        def forward(i: int = 0) -> Tensor:
            return run(self.hidden, self.weight, self.labels)

        def backward(out: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (self.hidden, self.weight))

        def compare() -> dict[str, float]:
            out = forward()
            return errors(_answer(out, backward(out)), self.reference())

        return Work(forward, backward, compare, per_repetition=len(self.labels), unit="tokens/s")

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
