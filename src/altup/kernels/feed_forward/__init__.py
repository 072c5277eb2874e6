"""T5's gated feed-forward, whose GEGLU is part of its products where rows are short."""

from __future__ import annotations

from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.feed_forward.op import feed_forward_op
from altup.kernels.feed_forward.reference import feed_forward_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["feed_forward", "feed_forward_reference", "takes_kernels"]

# Numbers of a row up to which "auto" takes the kernels: longer ones make products that cuBLAS is better at. 0,
# none, until a GPU has timed it.
SHORT = 0


def takes_kernels(x: Tensor, hidden: int, implementation: str = "auto") -> bool:
    """Whether the kernels are for rows like x's and so many hidden numbers."""
    d = x.shape[-1]
    fits = x.dtype in FUSED_DTYPES and d % 16 == 0 and hidden % 16 == 0 and x.numel() > 0
    if implementation == "auto":
        return fits and x.element_size() == 2 and d <= SHORT and runs_triton(x.device)
    return fits and implementation == "triton" and can_launch(x.device)


def feed_forward(x: Tensor, wi: Tensor, wo: Tensor, implementation: str = "auto") -> Tensor:
    """wo·(gelu(gate) ⊙ linear) with [gate | linear] = wi·x: [..., d], [2·n, d], [d, n] → [..., d], all of one
    dtype.

    implementation: "triton", the kernels, on Ampere GPUs or later; "plain"; "auto", the kernels where they pay.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if not takes_kernels(x, wo.shape[1], implementation):
        if implementation == "triton":
            raise UserError(
                "implementation='triton' needs a CUDA GPU, Triton, 16 or 32 bits and widths that are multiples of "
                f"16, not {x.dtype} {list(x.shape)} on {x.device} with {wo.shape[1]} hidden; use 'auto' or 'plain'"
            )
        return feed_forward_reference(x, wi, wo)
    y, _, _ = feed_forward_op(x.contiguous().view(-1, x.shape[-1]), wi.contiguous(), wo.contiguous())
    return y.view(x.shape)
