"""The definition of one update of Adafactor, as T5 uses it (Shazeer and Stern, 2018, with the constants of T5)."""

from __future__ import annotations

from torch import Tensor

SMALLEST_SQUARE = 1e-30
LARGEST_RMS = 1.0
DECAY_POWER = 0.8


def adafactor_reference(
    weight: Tensor, grad: Tensor, row: Tensor, column: Tensor, step: Tensor | int, *, lr: Tensor | float,
    smallest: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new weight w and moments r and c of a matrix after step number `step` = t = 1, 2, …; β = 1 - t^-0.8:

        r ← β·r + (1-β)·(mean over columns of g² + 1e-30)
        c ← β·c + (1-β)·(mean over rows of g² + 1e-30)
        U = g · √mean(r) / √(r ⊗ c)
        w ← w - lr · max(smallest, RMS(w)) · U / max(1, RMS(U))

    weight, grad: [rows, columns], row: [rows], column: [columns]; nothing is overwritten.
    """
    beta = 1 - step**-DECAY_POWER
    row = beta * row + (1 - beta) * (grad.square().mean(1) + SMALLEST_SQUARE)
    column = beta * column + (1 - beta) * (grad.square().mean(0) + SMALLEST_SQUARE)
    update = grad * row.mean().sqrt() / (row.sqrt()[:, None] * column.sqrt()[None, :])
    update = update / (_rms(update) / LARGEST_RMS).clamp(min=1)
    return weight - lr * _rms(weight).clamp(min=smallest) * update, row, column


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
