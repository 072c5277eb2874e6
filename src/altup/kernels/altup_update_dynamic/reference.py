"""The definition of `altup_update` with coefficients that differ from token to token, as Gemma 3n has them."""

from __future__ import annotations

import torch
from torch import Tensor


def altup_update_dynamic_reference(x: Tensor, y: Tensor, P: Tensor, g: Tensor, active: int) -> Tensor:
    """For every token, with its own P and g: predict every block, then correct every block.

        x̂ⁱ = Σⱼ Pᵢⱼ xʲ,    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ),

    where y is the layer's output for the active block a. x: [K, ..., d], y: [..., d], P: [..., K, K], g: [..., K].
    """
    predicted = torch.einsum("...ij,j...d->i...d", P, x)
    return (predicted + g.movedim(-1, 0).unsqueeze(-1) * (y - predicted[active])).to(x.dtype)
