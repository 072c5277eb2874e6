"""Sequence-AltUp's update of all tokens from the few that a layer computed: Algorithm 2 of the paper.

Every token i has an anchor, the kept token ⌊i/k⌋·k at or before it. With predictions
ŷᵢ = a₁ xᵢ + a₂ x_anchor(i) and the layer's output ỹ at the anchors,

    yᵢ = ŷᵢ + b (ỹ_anchor(i) − ŷ_anchor(i)) = a₁ xᵢ + [(a₂ − b (a₁ + a₂)) x_anchor(i) + b ỹ_anchor(i)],

where the bracket is the same for all k tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_update_reference(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    """The definition, token by token.

    x: [batch, T, d], computed: [batch, ⌈T/stride⌉, d], a: [2] holding a₁ and a₂, b: [1].
    """
    predicted = [a[0] * x[:, i] + a[1] * x[:, i // stride * stride] for i in range(x.shape[1])]
    corrected = [
        predicted[i] + b[0] * (computed[:, i // stride] - predicted[i // stride * stride])
        for i in range(x.shape[1])
    ]
    return torch.stack(corrected, dim=1).to(x.dtype)


def sequence_update(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    """Same as `sequence_update_reference`, one pass over the sequence."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    kept = x[:, ::stride].to(dtype)
    window = (a[1] - b[0] * (a[0] + a[1])) * kept + b[0] * computed.to(dtype)
    spread = window.unsqueeze(2).expand(-1, -1, stride, -1).flatten(1, 2)[:, : x.shape[1]]
    return (a[0] * x.to(dtype) + spread).to(x.dtype)
