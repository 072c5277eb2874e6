"""The definition of GEGLU in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from altup.kernels.dropout.reference import keep_scale


def geglu_reference(h: Tensor, keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    """gelu(gate) ⊙ linear of h = [gate | linear], [..., 2·n] → [..., n], with the tanh form of GELU.

    keep: which numbers dropout keeps, bool [..., n].
    """
    gate, linear = h.chunk(2, dim=-1)
    hidden = F.gelu(gate, approximate="tanh") * linear
    return hidden if keep is None else hidden * keep * keep_scale(p)
