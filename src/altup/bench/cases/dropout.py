"""Dropout before a residual addition, as layers have it, against the addition alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.bench.problem import Problem, Provider, Setup, Work
from altup.kernels.dropout import dropout

P = 0.1
SPREADS = 5  # of a binomial distribution, within which the share that is dropped must be
Drop = Callable[[Tensor, float], Tensor]


def problems(setup: Setup) -> Iterator[Problem]:
    tokens = 64 if setup.quick else 64 * 512
    for d in (16,) if setup.quick else (768, 2048):
        inputs = Inputs(setup, tokens, d)
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


class Inputs:
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

        def forward(i: int = 0) -> Tensor:
            return run(self.x, self.residual)

        def backward(out: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, self.x, self.upstream)

        def compare() -> dict[str, float]:
            out = forward()
            return self._errors(out.detach(), backward(out)[0])

        return Work(forward, backward, compare if drop else None, per_repetition=len(self.x), unit="tokens/s")

    def _errors(self, out: Tensor, gradient: Tensor) -> dict[str, float]:
        """Against what the gradient says was kept; and the share that was, in units of what chance allows."""
        kept = gradient != 0
        want = self.residual + self.x.detach() * kept / (1 - P)
        spread = SPREADS * (P * (1 - P) / kept.numel()) ** 0.5
        return {
            "result": ((out - want).norm() / want.norm()).item(),
            "gradient": ((gradient - self.upstream * kept / (1 - P)).norm() / gradient.norm()).item(),
            "share dropped": abs(1 - kept.double().mean().item() - P) / spread,
        }
