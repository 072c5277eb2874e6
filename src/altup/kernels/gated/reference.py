"""The definition of gated layers' activations in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from altup.kernels.dropout.reference import keep_scale

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def gated_reference(h: Tensor, activation: str, keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    """activation(gate) ⊙ linear of h = [gate | linear], [..., 2·n] → [..., n].

    keep: which numbers dropout keeps, bool [..., n].
    """
    gate, linear = h.chunk(2, dim=-1)
    hidden = ACTIVATIONS[activation](gate) * linear
    return hidden if keep is None else hidden * keep * keep_scale(p)
