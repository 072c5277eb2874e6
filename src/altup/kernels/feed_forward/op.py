"""The feed-forward as a custom operator of PyTorch, opaque to `torch.compile`, with its gradient registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device


@library.custom_op("altup::feed_forward", mutates_args=())
@on_its_device
def feed_forward_op(x: Tensor, wi: Tensor, wo: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result [rows, d], and for the gradient h = x·wiᵀ [rows, 2·n] and its GEGLU; all given are contiguous."""
    from altup.kernels.feed_forward.triton import forward

    y, h, hidden = _empty(x, wi, wo)
    forward(h, hidden, x, wi)
    return torch.mm(hidden, wo.t(), out=y), h, hidden


@library.custom_op("altup::feed_forward_backward", mutates_args=())
@on_its_device
def hidden_gradient_op(grad: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    """That of h."""
    from altup.kernels.feed_forward.triton import backward

    d_h = torch.empty_like(h)
    backward(d_h, grad, wo, h)
    return d_h


@feed_forward_op.register_fake
def _empty(x: Tensor, wi: Tensor, wo: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, (d, n) = len(x), wo.shape
    return x.new_empty(rows, d), x.new_empty(rows, 2 * n), x.new_empty(rows, n)


@hidden_gradient_op.register_fake
def _(grad: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    return torch.empty_like(h)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, h, hidden = output
    ctx.mark_non_differentiable(h, hidden)
    ctx.save_for_backward(*inputs, h, hidden)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, ...]:
    x, wi, wo, h, hidden = ctx.saved_tensors
    grad = grad.contiguous()
    d_h = hidden_gradient_op(grad, wo, h)
    return d_h @ wi, d_h.t() @ x, grad.t() @ hidden


feed_forward_op.register_autograd(_differentiate, setup_context=_save)
