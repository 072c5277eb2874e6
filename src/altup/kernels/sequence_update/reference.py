"""The definition of Sequence-AltUp's update of all tokens from the few that a layer computed: Algorithm 2."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_update_reference(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    """Predict every token from itself and its anchor, the kept token ⌊i/stride⌋·stride, then correct it with ỹ,
    what the layer computed for the anchor:

        ŷᵢ = a₁ xᵢ + a₂ x_anchor(i),    yᵢ = ŷᵢ + b (ỹ_anchor(i) − ŷ_anchor(i)).

    x: [batch, T, d], computed: [batch, ⌈T/stride⌉, d], a: [2] holding a₁ and a₂, b: [1].
    """
    predicted = [a[0] * x[:, i] + a[1] * x[:, i // stride * stride] for i in range(x.shape[1])]
    corrected = [
        predicted[i] + b[0] * (computed[:, i // stride] - predicted[i // stride * stride])
        for i in range(x.shape[1])
    ]
    return torch.stack(corrected, dim=1).to(x.dtype)
