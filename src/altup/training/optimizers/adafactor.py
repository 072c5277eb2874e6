"""Adafactor as T5 uses it (Shazeer and Stern, 2018, with the constants of T5's own code)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from altup.kernels.adafactor import adafactor_update, runs_fused
from altup.kernels.adafactor.reference import DECAY_POWER, LARGEST_RMS, SMALLEST_SQUARE
from altup.training.optimizers.relative import SMALLEST_RMS, RelativeOptimizer, along
from altup.training.optimizers.sharding import Kind, local

FACTORED_FROM = 128


class Adafactor(RelativeOptimizer):
    """Second moments that take almost no memory: of a large matrix only the sums of rows and columns.

    At step t = 0, 1, ... with gradient G and β = 1 - (t+1)^-0.8, a matrix with both sides of at least 128 keeps

        r ← β·r + (1-β)·(mean over columns of G² + 1e-30)        [rows]
        c ← β·c + (1-β)·(mean over rows of G² + 1e-30)           [columns]
        U = G · √mean(r) / √(r ⊗ c)

    and any other tensor v ← β·v + (1-β)·(G² + 1e-30), U = G / √v. Then

        p ← p - lr · max(1e-3, RMS(p)) · U / max(1, RMS(U)).

    A tensor of more dimensions is a pile of matrices: its last two are factored, each matrix for itself, when
    both are at least 128; the two RMS are those of the whole tensor. (Experts of hidden width 16 are thus not
    factored.) There is no momentum, no weight decay and no relative step: lr comes from the schedule.

    State of a parameter: `step` (steps taken) and `row` and `column`, or `square`, in float32.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor) -> None:
        super().__init__(params, lr=lr)

    def initial_state(self, p: Tensor, what: Kind, group: dict[str, Any]) -> dict[str, Tensor]:
        if len(what.shape) < 2 or min(what.shape[-2:]) < FACTORED_FROM:
            return {"square": what.zeros(*what.shape)}
        *batch, rows, columns = what.shape
        if batch:
            return {"row": what.zeros(*batch, rows), "column": what.zeros(*batch, columns)}
        # A matrix is sharded by rows: each process knows its own rows, and all columns.
        everywhere = torch.zeros(columns, dtype=what.working_dtype, device=what.device)
        return {"row": what.zeros(rows), "column": everywhere}

    def _update(self, what: Kind, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """By kernels, many matrices at once, where they can."""
        weights = [local(p) for p in parameters]
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        factors = len(what.shape) == 2 and "row" in self.state[parameters[0]] and what.is_everywhere
        if not (factors and runs_fused(weights, grads)):
            super()._update(what, parameters, group, skip)
            return
        stored = ([local(self.state[p][name]) for p in parameters] for name in ("row", "column", "step"))
        adafactor_update(
            weights, grads, *stored,
            lr=group["lr"], skip=skip, smallest=SMALLEST_RMS, shape=what.shape, total=what.total,
        )  # fmt: skip

    def direction(
        self, what: Kind, state: dict[str, Tensor], grad: Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        fresh = state["step"].to(grad.dtype) ** -DECAY_POWER  # 1 - β; from β itself float32 loses digits
        if "square" in state:
            square = state["square"].lerp(grad.square() + SMALLEST_SQUARE, along(fresh, grad))
            moments, update = {"square": square}, grad.mul_(square.rsqrt())
        else:
            moments, update = factored(what, state["row"], state["column"], grad, fresh)
        return moments, update, 1 / (what.rms(update.unbind()) / LARGEST_RMS).clamp(min=1)


def factored(
    what: Kind, row: Tensor, column: Tensor, grad: Tensor, fresh: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """New row and column moments, and U for `grad` [n, ..., rows, columns], which is overwritten.

    1e-30 is added to the means, and each root is taken by itself, so that a row without gradient gives 0 times
    a finite number: r / mean(r) could underflow, and 0 · 1/√0 is not a number.
    """
    square = grad.square()
    row = row.lerp(square.mean(-1) + SMALLEST_SQUARE, along(fresh, row))
    column_sum, row_sum = square.sum(-2), row.sum(-1)
    if len(what.shape) == 2:  # a pile of matrices is sharded between them, not across their rows
        column_sum, row_sum = what.total(column_sum, row_sum)
    rows = what.shape[-2]
    column = column.lerp(column_sum / rows + SMALLEST_SQUARE, along(fresh, column))
    row_factor = (row_sum / rows).sqrt().unsqueeze(-1) * row.rsqrt()
    update = grad.mul_(row_factor.unsqueeze(-1)).mul_(column.rsqrt().unsqueeze(-2))
    return {"row": row, "column": column}, update
