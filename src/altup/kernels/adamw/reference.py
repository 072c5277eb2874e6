"""The definition of one update of AdamW-RMS, whose steps are measured by the size of the weights."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_reference(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor | int, *, lr: Tensor | float,
    betas: tuple[float, float], eps: float, weight_decay: float, smallest: float,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new weight w and means m and v of a tensor after step number `step` = t = 1, 2, …:

        m ← β₁·m + (1 - β₁)·g
        v ← β₂·v + (1 - β₂)·g²
        w ← w - lr·weight_decay·w - lr · max(smallest, RMS(w)) · m/(1 - β₁ᵗ) / (√(v/(1 - β₂ᵗ)) + eps)

    weight, grad, mean, square: of one shape, any; nothing is overwritten. The size, max(smallest, RMS(w)), is
    at most the scalar `largest`.
    """
    beta1, beta2 = betas
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad.square()
    direction = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
    size = weight.square().mean().sqrt().clamp(min=smallest)
    if largest is not None:
        size = torch.minimum(size, largest.to(size.dtype))
    return weight - lr * weight_decay * weight - lr * size * direction, mean, square
