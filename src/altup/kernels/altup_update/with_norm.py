"""The update and the norm before the next layer in one pass forward and one backward.

Apart they are three: the norm reads the new active block again; backward it writes that block's gradient, and
autograd adds it to what the layer's residual and the next update say. Here all three are read by one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.add_norm import WIDEST
from altup.kernels.fp8 import Low
from altup.kernels.fp8.reference import VALUE
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

MOST_BLOCKS = 4  # whose sums fit into registers beside whole rows
SEEN_BLOCKS, SEEN_WIDTH = 2, 1024  # what "auto" takes: beyond it, a GPU has not shown the kernels right yet


class Updated(NamedTuple):
    """The new state, the block that the next layer works on as its residual, and that block's norm."""

    state: tuple[Tensor, ...]
    residual: Tensor
    normed: Tensor
    low: Low | None = None  # the norm in 8 bits, where that was asked for: `normed` only takes the gradient then


def takes_norm(state: Sequence[Tensor], implementation: str = "auto") -> bool:
    """Whether the kernels are for this state."""
    block = state[0]
    fits = 1 < len(state) <= MOST_BLOCKS and block.dtype in FUSED_DTYPES and 0 < block.shape[-1] <= WIDEST
    if implementation == "auto":
        seen = block.dtype == torch.bfloat16 and len(state) <= SEEN_BLOCKS and block.shape[-1] <= SEEN_WIDTH
        return fits and seen and runs_triton(block.device) and not torch.compiler.is_compiling()
    return fits and implementation == "triton" and can_launch(block.device)


def altup_update_norm(
    state: Sequence[Tensor],
    y: Tensor,
    residual: Tensor,
    P: Tensor,
    g: Tensor,
    active: int,
    weight: Tensor,
    eps: float,
    following: int,
    implementation: str = "auto",
    low: bool = False,
) -> Updated:
    """`altup_update` of a state of K blocks with residual + y, and the norm of the new block `following`:
    x / √(mean(x²) + ε) · weight.

    state: K tensors [..., d]; y, residual: [..., d]; P: [K, K], g: [K]; weight: [d]. With `low` the kernels write
    the norm in 8 bits, and the plain expression as ever.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    alike = all(x.shape == y.shape and x.dtype == y.dtype for x in (*state, residual))
    if implementation == "triton" and not (alike and takes_norm(state, "triton")):
        raise UserError(
            f"implementation='triton' takes 2 to {MOST_BLOCKS} blocks alike in 16 or 32 bits on a CUDA GPU, not "
            f"{[list(x.shape) for x in state]} {y.dtype} on {y.device}; use 'auto' or 'plain'"
        )
    if implementation != "plain" and alike and takes_norm(state, implementation):
        given = y, residual, P, g, weight, active, following, eps, low
        *new, again, normed, q, scale = _UpdateAndNorm.apply(*state, *given)
        return Updated(tuple(new), again, normed, Low(q, scale) if low else None)
    return _plain(state, y, residual, P, g, active, weight, eps, following)


def _plain(
    state: Sequence[Tensor], y: Tensor, residual: Tensor, P: Tensor, g: Tensor, active: int, weight: Tensor,
    eps: float, following: int,
) -> Updated:  # fmt: skip
    from altup.kernels.altup_update import altup_update

    new: Any = altup_update(tuple(state), y, P, g, active, residual)
    block = new[following]
    wide = block.to(torch.promote_types(block.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return Updated(new, block, (wide * scale * weight).to(block.dtype))


class _UpdateAndNorm(torch.autograd.Function):
    """The block that the next layer reads comes out twice, so that its two gradients come in apart."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        from altup.kernels.altup_update import norm_triton as kernels
        from altup.kernels.altup_update.triton import like

        *state, y, residual, P, g, weight, ctx.active, ctx.following, eps, low = given
        new = like(state)
        normed = torch.empty_like(new[0])
        rms = y.new_empty(y.shape[:-1], dtype=torch.float32)
        q, scale = (torch.empty_like(normed, dtype=VALUE), rms.new_empty(())) if low else (None, None)
        blocks = ctx.active, ctx.following
        with torch.cuda.device_of(y):
            kernels.forward(new, normed, rms, state, y, residual, P, g, weight, *blocks, eps, q, scale)
        ctx.save_for_backward(*state, y, residual, P, g, weight, rms)
        if low:
            ctx.mark_non_differentiable(q, scale)
        return *new, new[ctx.following].detach(), normed, q, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from altup.kernels.altup_update import norm_triton as kernels
        from altup.kernels.altup_update.triton import like

        *grads, d_again, d_normed, _, _ = gradients
        *state, y, residual, P, g, weight, rms = ctx.saved_tensors
        *d_state, dy, dP, dg, d_weight = like([*state, y, P, g, weight])
        with torch.cuda.device_of(y):
            kernels.backward(
                d_state, dy, dP, dg, d_weight, grads, d_again, d_normed, rms, state, y, residual, P, g, weight,
                ctx.active, ctx.following,
            )  # fmt: skip
        return *d_state, dy, dy, dP, dg, d_weight, *[None] * 4
