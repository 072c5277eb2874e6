"""The maps around a residual addition as custom operators of PyTorch, opaque to `torch.compile`.

With s = x + a·wᵀ and its norm n, y = n·fᵀ, and the gradients d_s and d_y,

    d_n = d_y·f,   d_x = d_s + the norm's of d_n,   d_a = d_x·w,   d_w = d_xᵀ·a,   d_f = d_yᵀ·n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.feed_forward.op import hidden_gradient_op
from altup.kernels.launch import on_its_device


@library.custom_op("altup::residual_maps", mutates_args=())
@on_its_device
def residual_maps_op(
    x: Tensor,
    a: Tensor,
    hidden: Tensor | None,
    w: Tensor,
    norm_weight: Tensor,
    following: Tensor,
    eps: float,
    gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """s and y; with `gates` y's GEGLU, or nothing; n, and 1 / rms of each row of s. All given are contiguous.

    `hidden` is a's GEGLU where the map w is behind one.
    """
    from altup.kernels.feed_forward.triton import forward as product_with_geglu
    from altup.kernels.residual_maps.triton import forward

    total, y, gated, normed, rms = _empty(x, a, hidden, w, norm_weight, following, eps, gates)
    forward(total, normed, rms, x, a if hidden is None else hidden, w, norm_weight, eps)
    if gates:
        product_with_geglu(y, gated, normed, following)
    else:
        torch.mm(normed, following.t(), out=y)
    return total, y, gated, normed, rms


@library.custom_op("altup::residual_maps_backward", mutates_args=())
@on_its_device
def total_gradient_op(
    d_total: Tensor, dy: Tensor, following: Tensor, total: Tensor, rms: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """That of s with what comes through its norm, and the norm weight's."""
    from altup.kernels.residual_maps.triton import backward

    dx, d_weight = torch.empty_like(total), torch.empty_like(norm_weight)
    backward(dx, d_weight, d_total, dy, following, total, rms, norm_weight)
    return dx, d_weight


@residual_maps_op.register_fake
def _empty(
    x: Tensor, a: Tensor, hidden: Any, w: Any, norm_weight: Any, following: Tensor, eps: float, gates: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, n = len(x), len(following)
    y, gated = x.new_empty(rows, n), x.new_empty(rows if gates else 0, n // 2)
    return torch.empty_like(x), y, gated, torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@total_gradient_op.register_fake
def _(
    d_total: Any, dy: Any, following: Any, total: Tensor, rms: Any, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(norm_weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, a, hidden, w, norm_weight, following, _, _ = inputs
    total, _, gated, normed, rms = output
    ctx.mark_non_differentiable(gated, normed, rms)
    ctx.save_for_backward(a, hidden, w, norm_weight, following, total, normed, rms)


def _differentiate(ctx: Any, d_total: Tensor, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    a, hidden, w, norm_weight, following, total, normed, rms = ctx.saved_tensors
    dy = dy.contiguous()
    dx, d_weight = total_gradient_op(d_total.contiguous(), dy, following, total, rms, norm_weight)
    if hidden is None:
        d_a, d_w = dx @ w, dx.t() @ a
    else:
        d_a, d_w = hidden_gradient_op(dx, w, a), dx.t() @ hidden
    return dx, d_a, None, d_w, d_weight, dy.t() @ normed, None, None


residual_maps_op.register_autograd(_differentiate, setup_context=_save)


@library.custom_op("altup::gated_map", mutates_args=())
@on_its_device
def gated_map_op(h: Tensor, hidden: Tensor, w: Tensor) -> Tensor:
    """hidden·wᵀ, where `hidden` is h's GEGLU; its gradient goes to h."""
    return torch.mm(hidden, w.t())


@gated_map_op.register_fake
def _(h: Tensor, hidden: Tensor, w: Tensor) -> Tensor:
    return hidden.new_empty(len(hidden), len(w))


def _save_gated(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gated(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    h, hidden, w = ctx.saved_tensors
    grad = grad.contiguous()
    return hidden_gradient_op(grad, w, h), None, grad.t() @ hidden


gated_map_op.register_autograd(_differentiate_gated, setup_context=_save_gated)
