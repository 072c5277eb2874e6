"""The definition of what stands between two parts of a layer, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from altup.kernels.add_norm.reference import add_norm_reference
from altup.kernels.geglu.reference import geglu_reference


def residual_maps_reference(
    x: Tensor, a: Tensor, w: Tensor, norm_weight: Tensor, eps: float, following: Tensor, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """s = x + a·wᵀ, and norm(s)·followingᵀ: [..., d], [..., k], [d, k], [d], [n, d] → [..., d], [..., n].

    With `gated` the map w is behind a GEGLU: a is [..., 2·k].
    """
    total, normed = add_norm_reference(x, F.linear(geglu_reference(a) if gated else a, w), norm_weight, eps)
    return total, F.linear(normed, following)
