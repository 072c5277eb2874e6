"""Rotary positions of queries and keys that one product has made, together with the values beside them."""

from __future__ import annotations

from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton
from altup.kernels.rotary.reference import rotary_heads_reference, rotate

__all__ = ["rotary_heads", "rotary_heads_reference", "rotate"]


def rotary_heads(
    joined: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int, implementation: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, tokens, (queries + 2·keys)·width] → queries, keys and values,
    [batch, heads, tokens, width], the first two turned.

    cosine, sine: [batch or 1, 1, tokens, width / 2], in float32. implementation: "triton", one pass forward and
    one backward, computed in float32 and rounded once, whose results are contiguous by token; "plain"; "auto", the
    kernels where they run.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    fits = joined.dtype in FUSED_DTYPES and joined.numel() > 0 and not cosine.requires_grad
    if implementation == "auto":
        implementation = "triton" if fits and runs_triton(joined.device) else "plain"
    if implementation == "plain":
        return rotary_heads_reference(joined, cosine, sine, queries, keys)
    if not (fits and can_launch(joined.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton, 16 or 32 bits and fixed angles, not "
            f"{joined.dtype} {list(joined.shape)} on {joined.device}; use 'auto' or 'plain'"
        )
    from altup.kernels.rotary.triton import rotary_op

    q, k, v = rotary_op(joined.contiguous(), cosine.contiguous(), sine.contiguous(), queries, keys)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
