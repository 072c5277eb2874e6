"""Warps and vectors of Gemma 3n's kernels: each pair checked against float32, then timed.

    python benchmarks/tune_gemma3n.py

Under TRITON_INTERPRET=1 it runs on a CPU at toy sizes and times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tuning import DEVICE, INTERPRETED, distance, milliseconds

from altup.kernels.gemma3n import (
    Router,
    coefficients_kernels,
    correct,
    correct_kernels,
    correction,
    ends_kernels,
    gate_kernels,
    gated,
    match_magnitudes,
    predict,
    predict_kernels,
)
from altup.kernels.launch import Config

K, ACTIVE, EPS = 4, 0, 1e-6
TOKENS, D = (2, 48) if INTERPRETED else (32_768, 2048)
CONFIGS = [(1, 1), (2, 1)] if INTERPRETED else [(w, v) for w in (1, 2, 4, 8) for v in (1, 2)]
Run = Callable[[str], Any]


def random(*size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*size, device=DEVICE) * scale).bfloat16().requires_grad_()


class Problem:
    """Each function on blocks apart, as a layer calls it, with weights that want no gradient, as under LoRA."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.blocks = [random(TOKENS, D) for _ in range(K)]
        self.y, self.branch = random(TOKENS, D), random(TOKENS, D)
        self.router = Router(random(K, D, scale=D**0.5).detach(), random(D).detach(), EPS)
        self.A, self.C = random(K * K, K).detach(), random(K, K).detach()
        self.scale, self.norm = random(D).detach(), random(D).detach()
        self.g = torch.randn(TOKENS, K, device=DEVICE).requires_grad_()

    def runs(self) -> dict[str, tuple[Any, Run, list[Tensor]]]:
        """By name: the kernels' module, the function of an implementation, and what wants a gradient."""
        return {
            "predict": (
                predict_kernels,
                lambda kind: predict(self.blocks, self.router, self.A, ACTIVE, kind, stacked=True),
                self.blocks,
            ),
            "correction": (
                coefficients_kernels,
                lambda kind: correction(
                    self.y, self.router, self.C, self.blocks[0], ACTIVE, self.scale, implementation=kind
                )[1],
                [self.y, self.blocks[0]],
            ),
            "correct": (
                correct_kernels,
                lambda kind: correct(
                    self.blocks, self.y, self.g, ACTIVE, self.branch, self.norm, EPS, implementation=kind
                ),
                [*self.blocks, self.y, self.g, self.branch],
            ),
            "gated": (
                gate_kernels,
                lambda kind: gated(self.y, self.branch, 0.95, kind),
                [self.y, self.branch],
            ),
            "match": (
                ends_kernels,
                lambda kind: match_magnitudes(self.blocks[0], self.blocks[1:], False, kind),
                self.blocks,
            ),
        }


def tune(name: str, kernels: Any, run: Run, inputs: list[Tensor]) -> None:
    want = run("plain")
    upstream = torch.randn_like(want)
    slopes = torch.autograd.grad(want, inputs, upstream)
    for warps, vectors in CONFIGS:
        kernels.FORWARD = kernels.BACKWARD = Config(warps=warps, vectors=vectors)
        new = run("triton")
        got = torch.autograd.grad(new, inputs, upstream, retain_graph=True)
        error = max(distance(a, b) for a, b in zip([new, *got], [want, *slopes], strict=True))
        assert error < 2e-2, (name, warps, vectors, error)
        there = milliseconds(partial(run, "triton"))
        back = milliseconds(partial(torch.autograd.grad, new, inputs, upstream, retain_graph=True))
        print(f"{name:10s}  warps {warps}  vectors {vectors}  error {error:.1e}  forward {there}  backward {back}")


def main() -> None:
    problem = Problem()
    for name, (kernels, run, inputs) in problem.runs().items():
        tune(name, kernels, run, inputs)
    if not INTERPRETED:
        state = torch.stack([block.detach() for block in problem.blocks])
        print(f"floor: a copy of the state, {milliseconds(partial(torch.clone, state))}")


if __name__ == "__main__":
    main()
