"""Sequence-AltUp's update of all tokens from the few that a layer computed: Algorithm 2 of the paper.

Every token i has an anchor, the kept token ⌊i/k⌋·k at or before it. With predictions
ŷᵢ = a₁ xᵢ + a₂ x_anchor(i) and the layer's output ỹ at the anchors,

    yᵢ = ŷᵢ + b (ỹ_anchor(i) − ŷ_anchor(i)) = a₁ xᵢ + [(a₂ − b (a₁ + a₂)) x_anchor(i) + b ỹ_anchor(i)],

where the bracket is the same for all k tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.availability import FUSED_DTYPES, interprets_triton, runs_triton
from altup.kernels.sequence_update_op import sequence_update_op

FUSED_STRIDE = 16


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


def sequence_update(
    x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int, implementation: str = "auto"
) -> Tensor:
    """Same as `sequence_update_reference`, one pass over the sequence.

    "auto" takes the Triton kernels on CUDA GPUs where they can run, "triton" insists on them and "plain" goes
    without.
    """
    check_choice("implementation", implementation, ("auto", "plain", "triton"))
    if computed.shape != (x.shape[0], -(-x.shape[1] // stride), x.shape[2]) or computed.device != x.device:
        raise UserError(
            f"x {list(x.shape)} on {x.device} and the layer's output {list(computed.shape)} on {computed.device} "
            f"do not fit together at stride={stride}"
        )
    fits = stride <= FUSED_STRIDE and x.numel() < 2**31 and {x.dtype, computed.dtype} <= set(FUSED_DTYPES)
    if implementation == "triton" and not (fits and (runs_triton(x.device) or interprets_triton())):
        raise UserError(
            f"implementation='triton' takes strides up to {FUSED_STRIDE} in float16, bfloat16 or float32 on CUDA "
            f"GPUs, not stride={stride} with {x.dtype} and {computed.dtype} on {x.device}; use 'auto' or 'plain'"
        )
    if implementation == "triton" or (implementation == "auto" and fits and runs_triton(x.device)):
        return sequence_update_op(x, computed, a.float(), b.float(), stride)
    return _plain(x, computed, a, b, stride)


def _plain(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    kept = x[:, ::stride].to(dtype)
    window = (a[1] - b[0] * (a[0] + a[1])) * kept + b[0] * computed.to(dtype)
    spread = window.unsqueeze(2).expand(-1, -1, stride, -1).flatten(1, 2)[:, : x.shape[1]]
    return (a[0] * x.to(dtype) + spread).to(x.dtype)
