"""Adafactor as T5 uses it (Shazeer and Stern, 2018, with the constants of T5's own code)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from altup.kernels.availability import FUSED_DTYPES, runs_triton
from altup.training.optimizers.relative import SMALLEST_RMS, RelativeOptimizer, along
from altup.training.optimizers.sharding import Kind, local

FACTORED_FROM = 128
SMALLEST_SQUARE = 1e-30
LARGEST_RMS = 1.0
DECAY_POWER = 0.8


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

    def initial_moments(self, what: Kind, group: dict[str, Any]) -> dict[str, Tensor]:
        if len(what.shape) < 2 or min(what.shape[-2:]) < FACTORED_FROM:
            return {"square": what.zeros(*what.shape)}
        *batch, rows, columns = what.shape
        if batch:
            return {"row": what.zeros(*batch, rows), "column": what.zeros(*batch, columns)}
        # A matrix is sharded by rows: each process knows its own rows, and all columns.
        everywhere = torch.zeros(columns, dtype=what.working_dtype, device=what.device)
        return {"row": what.zeros(rows), "column": everywhere}

    def _update(self, what: Kind, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        factors = len(what.shape) == 2 and "row" in self.state[parameters[0]] and what.is_everywhere
        if factors and runs_triton(what.device) and what.dtype in FUSED_DTYPES:
            self._update_in_place(what, parameters, group, skip)
        else:
            super()._update(what, parameters, group, skip)

    def _update_in_place(
        self, what: Kind, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None
    ) -> None:
        """The same update by kernels that read each gradient three times and write nothing but the weights."""
        from altup.kernels import adafactor as kernels
        from altup.kernels.addresses import fits, listed

        states = [self.state[p] for p in parameters]
        stored = {name: [local(state[name]) for state in states] for name in states[0]}
        old = {name: torch.stack(tensors) for name, tensors in stored.items()}
        kept = [local(p.grad) for p in parameters if p.grad is not None]
        if not fits([*kept, *map(local, parameters)]):
            super()._update(what, parameters, group, skip)
            return
        grads, weights = listed(kept), listed([local(p) for p in parameters])
        by_row, by_column, of_weights = kernels.squares(grads, weights)

        step = old["step"] + 1
        fresh = step**-DECAY_POWER
        row = old["row"].lerp(by_row / what.shape[1] + SMALLEST_SQUARE, along(fresh, by_row))
        column_sum, row_sum, of_weights = what.total(by_column, row.sum(-1), of_weights)
        column = old["column"].lerp(column_sum / what.shape[0] + SMALLEST_SQUARE, along(fresh, column_sum))
        row_factor = (row_sum / what.shape[0]).sqrt().unsqueeze(-1) * row.rsqrt()
        column_factor = column.rsqrt()

        (squares,) = what.total(kernels.update_squares(grads, row_factor, column_factor))
        shrink = 1 / ((squares / what.shape.numel()).sqrt() / LARGEST_RMS).clamp(min=1)
        size = (of_weights / what.shape.numel()).sqrt().clamp(min=SMALLEST_RMS)
        never = torch.zeros((), dtype=torch.bool, device=what.device)
        skip = never if skip is None else skip
        kernels.descend(weights, grads, row_factor, column_factor, group["lr"] * size * shrink, skip)
        for name, tensor in {"step": step, "row": row, "column": column}.items():
            torch._foreach_copy_(stored[name], list(torch.where(skip, old[name], tensor).unbind()))

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
