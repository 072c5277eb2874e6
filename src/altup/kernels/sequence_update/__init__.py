"""Sequence-AltUp's update of all tokens from the few that a layer computed, Algorithm 2, in one pass:

    yᵢ = ŷᵢ + b (ỹ_anchor(i) − ŷ_anchor(i)) = a₁ xᵢ + [(a₂ − b (a₁ + a₂)) x_anchor(i) + b ỹ_anchor(i)],

where the bracket is the same for all tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton
from altup.kernels.sequence_update.reference import sequence_update_reference

__all__ = ["sequence_update", "sequence_update_reference"]

FUSED_STRIDE = 16  # the longest that kernels take


def sequence_update(
    x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int, implementation: str = "auto"
) -> Tensor:
    """Same as `sequence_update_reference`, one pass over the sequence.

    "auto" takes the Triton kernels on CUDA GPUs where they can run, "triton" requires them, and "plain" does not
    use them.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if computed.shape != (x.shape[0], -(-x.shape[1] // stride), x.shape[2]) or computed.device != x.device:
        raise UserError(
            f"x {list(x.shape)} on {x.device} and the layer's output {list(computed.shape)} on {computed.device} "
            f"do not fit together at stride={stride}"
        )
    fits = stride <= FUSED_STRIDE and x.numel() < 2**31 and {x.dtype, computed.dtype} <= set(FUSED_DTYPES)
    if implementation == "triton" and not (fits and can_launch(x.device)):
        raise UserError(
            f"implementation='triton' takes strides up to {FUSED_STRIDE} in float16, bfloat16 or float32 on CUDA "
            f"GPUs, not stride={stride} with {x.dtype} and {computed.dtype} on {x.device}; use 'auto' or 'plain'"
        )
    if implementation == "triton" or (implementation == "auto" and fits and runs_triton(x.device)):
        from altup.kernels.sequence_update.triton import sequence_update_op

        return sequence_update_op(x, computed, a.float(), b.float(), stride)
    return _plain(x, computed, a, b, stride)


def _plain(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    kept = x[:, ::stride].to(dtype)
    window = (a[1] - b[0] * (a[0] + a[1])) * kept + b[0] * computed.to(dtype)
    spread = window.unsqueeze(2).expand(-1, -1, stride, -1).flatten(1, 2)[:, : x.shape[1]]
    return (a[0] * x.to(dtype) + spread).to(x.dtype)
