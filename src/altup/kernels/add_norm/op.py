"""Addition and norm as a custom operator of PyTorch, opaque to `torch.compile`, with its gradient registered.

With s the sum, r = 1 / √(mean(s²) + ε), n the gradient of the norm's result and d that of s,

    d_x = d + r·(n·w − s·r²·mean(n·w·s)),   d_update = z·d_x,   d_w = Σ n·s·r,

where z is what dropout multiplies the update by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.fp8.reference import VALUE
from altup.kernels.launch import on_its_device


@library.custom_op("altup::add_norm", mutates_args=())
@on_its_device
def add_norm_op(
    x: Tensor, update: Tensor, weight: Tensor, seed: Tensor | None, eps: float, p: float, low: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum, its norm, and 1 / √(mean(s²) + ε) of each row, float32; all given tensors are contiguous. Dropout
    has a seed [1], int64, or in its place the factors of each sequence, [..., 1, d], float32.

    With `low` the norm is left unwritten: it is there for its gradient. In its place are written what fp8 makes of
    it, and that's scale, which are else empty.
    """
    from altup.kernels.add_norm.triton import forward

    total, normed, rms, q, scale = results = _empty(x, low=low)
    forward(total, normed, rms, x, update, weight, seed, eps, p, *((q, scale) if low else ()))
    return results


@library.custom_op("altup::add_norm_backward", mutates_args=())
@on_its_device
def add_norm_backward_op(
    d_total: Tensor,
    d_normed: Tensor,
    total: Tensor,
    rms: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the update (empty without dropout, where it is x's) and of the weight."""
    from altup.kernels.add_norm.triton import backward

    gradients = _empty_gradients(total, weight, seed)
    backward(*gradients, d_total.contiguous(), d_normed.contiguous(), total, rms, weight, seed, p)
    return gradients


@add_norm_op.register_fake
def _(x: Tensor, update: Any, weight: Any, seed: Any, eps: Any, p: Any, low: bool) -> tuple[Tensor, ...]:
    return _empty(x, low)


def _empty(x: Tensor, low: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(x),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty(x.shape if low else 0, dtype=VALUE if low else torch.float32),
        x.new_empty(() if low else 0, dtype=torch.float32),
    )


@add_norm_backward_op.register_fake
def _(
    d_total: Tensor, d_normed: Tensor, total: Tensor, rms: Tensor, weight: Tensor, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(total, weight, seed)


def _empty_gradients(total: Tensor, weight: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(total), total.new_empty(0 if seed is None else total.shape), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, seed, _, ctx.p, _ = inputs
    total, _, rms, q, scale = output
    ctx.mark_non_differentiable(rms, q, scale)
    ctx.save_for_backward(total, rms, weight, seed)


def _differentiate(ctx: Any, d_total: Tensor, d_normed: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    total, rms, weight, seed = ctx.saved_tensors
    dx, d_update, d_weight = add_norm_backward_op(d_total, d_normed, total, rms, weight, seed, ctx.p)
    return dx, dx if seed is None else d_update, d_weight, *[None] * 4


add_norm_op.register_autograd(_differentiate, setup_context=_save)
