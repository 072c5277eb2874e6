"""The definition of one layer's update of the wide state: Algorithm 1 after the layer itself has run."""

from __future__ import annotations

import torch
from torch import Tensor


def altup_update_reference(x: Tensor, y: Tensor, P: Tensor, g: Tensor, active: int) -> Tensor:
    """Predict every block, then correct every block:

        x̂ⁱ = Σⱼ Pᵢⱼ xʲ,    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ),

    where y is the layer's output for the active block a. x: [K, ..., d], y: [..., d], P: [K, K], g: [K].
    """
    K = x.shape[0]
    predicted = [sum((P[i, j] * x[j] for j in range(1, K)), start=P[i, 0] * x[0]) for i in range(K)]
    return torch.stack([predicted[i] + g[i] * (y - predicted[active]) for i in range(K)]).to(x.dtype)
