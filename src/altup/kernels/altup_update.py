"""One layer's update of the wide state: Algorithm 1 of the paper after the layer itself has run.

With predictions x̂ⁱ = Σⱼ Pᵢⱼ xʲ and the layer's output y for the active block a,

    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ)      =      Σⱼ Mᵢⱼ xʲ + gᵢ y      with M = P − g ⊗ P[a].

The right-hand form reads and writes the wide state once. Sums run in float32 (float64 for float64 states),
whatever the state's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def altup_update_reference(x: Tensor, y: Tensor, P: Tensor, g: Tensor, active: int) -> Tensor:
    """The definition, step by step: predict every block, then correct every block.

    x: [K, ..., d], y: [..., d], P: [K, K], g: [K].
    """
    K = x.shape[0]
    predicted = [sum((P[i, j] * x[j] for j in range(1, K)), start=P[i, 0] * x[0]) for i in range(K)]
    return torch.stack([predicted[i] + g[i] * (y - predicted[active]) for i in range(K)]).to(x.dtype)


def altup_update(x: Tensor, y: Tensor, P: Tensor, g: Tensor, active: int) -> Tensor:
    """x_new = M·x + g ⊗ y; same shapes and result as `altup_update_reference`."""
    M = P - torch.outer(g, P[active])
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.device.type == "cpu" and x.dtype == M.dtype and not torch.compiler.is_compiling():
        # One skinny matrix product is the quickest eager way on a CPU. Autocast would round the coefficients.
        with torch.autocast("cpu", enabled=False):
            mixed = (M @ x.reshape(x.shape[0], -1)).view(x.shape)
            return mixed + g.view(-1, *[1] * y.dim()) * y.to(dtype)
    blocks = [block.to(dtype) for block in x.unbind(0)]
    y = y.to(dtype)
    rows = []
    for i in range(len(blocks)):
        row = g[i] * y
        for j, block in enumerate(blocks):
            row = row + M[i, j] * block
        rows.append(row.to(x.dtype))
    return torch.stack(rows)
