"""The definition of T5's gated feed-forward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from altup.kernels.geglu.reference import geglu_reference


def feed_forward_reference(x: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """wo·(gelu(gate) ⊙ linear) with [gate | linear] = wi·x: [..., d], [2·n, d], [d, n] → [..., d]."""
    return F.linear(geglu_reference(F.linear(x, wi)), wo)
