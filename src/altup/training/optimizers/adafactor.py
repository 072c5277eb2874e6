"""Adafactor as T5 uses it (Shazeer and Stern, 2018; constants of the T5 and Mesh TensorFlow code)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from altup.training.optimizers.sharding import Kind, kind, local, stacks

FACTORED_FROM = 128
SMALLEST_SQUARE = 1e-30
SMALLEST_RMS = 1e-3
LARGEST_UPDATE = 1.0
DECAY_POWER = 0.8


class Adafactor(torch.optim.Optimizer):
    """Updates relative to each parameter's size, with second moments that take almost no memory.

    At step t = 0, 1, ... with gradient G and β = 1 - (t+1)^-0.8, a matrix with both sides of at least 128 keeps

        r ← β·r + (1-β)·(mean over columns of G² + 1e-30)        [rows]
        c ← β·c + (1-β)·(mean over rows of G² + 1e-30)           [columns]
        U = G · √mean(r) / √(r ⊗ c)

    and any other tensor v ← β·v + (1-β)·(G² + 1e-30), U = G / √v. Then

        p ← p - lr · max(1e-3, RMS(p)) · U / max(1, RMS(U)).

    A tensor of more dimensions is a pile of matrices: its last two are factored, each matrix for itself, when
    both are at least 128; the two RMS are taken over the whole tensor. (Experts of hidden width 16 are thus
    not factored.) There is no momentum, no weight decay, and no relative step: lr comes from the schedule.

    State of a parameter: `step` (completed steps) and `row`, `column` or `square`, in float32.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = initial_state(kind(p))

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """One update; where the bool scalar `skip` is true, none of weights and state."""
        for group in self.param_groups:
            for what, parameters in stacks(group["params"]):
                self._update(what, parameters, group["lr"], skip)

    def _update(self, what: Kind, parameters: list[Tensor], lr: float | Tensor, skip: Tensor | None) -> None:
        """Updates n parameters of one kind together: every tensor below has a leading dimension n."""
        states = [self.state[p] for p in parameters]
        stored = {name: [local(state[name]) for state in states] for name in states[0]}
        weights = [local(p) for p in parameters]
        grad = torch.stack([local(p.grad) for p in parameters if p.grad is not None]).to(what.working_dtype)
        old = {name: torch.stack(tensors) for name, tensors in stored.items()}

        new = {"step": old["step"] + 1}
        fresh = new["step"].to(grad.dtype) ** -DECAY_POWER  # 1 - β: in float32 β itself has lost its last digits
        norms = torch.stack(torch._foreach_norm(weights, 2, dtype=grad.dtype))
        second_moments = factored if "row" in old else full
        moments, update, weight_squares = second_moments(what, old, grad, fresh, norms.square())
        new.update(moments)

        update_norms = torch.linalg.vector_norm(update.flatten(1), dim=1)
        (update_squares,) = what.total(update_norms.square())
        count = what.shape.numel()
        clip = ((update_squares / count).sqrt() / LARGEST_UPDATE).clamp(min=1)
        scale = lr * (weight_squares / count).sqrt().clamp(min=SMALLEST_RMS) / clip
        update.mul_(along(scale, update))
        if skip is not None:
            update.masked_fill_(skip, 0)
            new = {name: torch.where(skip, old[name], tensor) for name, tensor in new.items()}
        torch._foreach_sub_(weights, list(update.unbind()))
        for name, tensors in stored.items():
            torch._foreach_copy_(tensors, list(new[name].unbind()))


def initial_state(what: Kind) -> dict[str, Tensor]:
    *batch, rows, columns = (0, 0, *what.shape)[-max(2, len(what.shape)) :]
    state = {"step": torch.zeros((), device=what.device)}
    if min(rows, columns) < FACTORED_FROM:
        return state | {"square": what.zeros(*what.shape)}
    if batch:
        return state | {"row": what.zeros(*batch, rows), "column": what.zeros(*batch, columns)}
    # A matrix is sharded by rows, so every process holds the statistics of all columns.
    everywhere = torch.zeros(columns, dtype=what.working_dtype, device=what.device)
    return state | {"row": what.zeros(rows), "column": everywhere}


def factored(
    what: Kind, state: dict[str, Tensor], grad: Tensor, fresh: Tensor, weight_squares: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """New moments and U for `grad` [n, ..., rows, columns], which is overwritten; and Σp² of the whole tensor.

    1e-30 is added to the means and the three roots are taken one by one, so that a row without gradient gives
    0 · (a finite number): r / mean(r) could underflow to 0, and 0 · 1/√0 is not a number.
    """
    square = grad.square()
    row = state["row"]
    row = row.lerp(square.mean(-1) + SMALLEST_SQUARE, along(fresh, row))
    column_sum, row_sum = square.sum(-2), row.sum(-1)
    if len(what.shape) == 2:
        column_sum, row_sum, weight_squares = what.total(column_sum, row_sum, weight_squares)
    else:
        (weight_squares,) = what.total(weight_squares)
    rows, column = what.shape[-2], state["column"]
    column = column.lerp(column_sum / rows + SMALLEST_SQUARE, along(fresh, column))
    row_factor = (row_sum / rows).sqrt().unsqueeze(-1) * row.rsqrt()
    update = grad.mul_(row_factor.unsqueeze(-1)).mul_(column.rsqrt().unsqueeze(-2))
    return {"row": row, "column": column}, update, weight_squares


def full(
    what: Kind, state: dict[str, Tensor], grad: Tensor, fresh: Tensor, weight_squares: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The same as `factored` with one moment an element."""
    (weight_squares,) = what.total(weight_squares)
    square = state["square"].lerp(grad.square() + SMALLEST_SQUARE, along(fresh, grad))
    return {"square": square}, grad.mul_(square.rsqrt()), weight_squares


def along(values: Tensor, tensor: Tensor) -> Tensor:
    """`values` [n] in a shape that multiplies `tensor` [n, ...]."""
    return values.view(-1, *[1] * (tensor.ndim - 1))
