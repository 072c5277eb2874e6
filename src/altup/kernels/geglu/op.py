"""GEGLU as a custom operator of PyTorch, opaque to `torch.compile`, with its gradient registered.

With x the gate, y the linear part, d the gradient of the result and z what dropout multiplies it by,

    d_x = d·z·y·gelu'(x),   d_y = d·z·gelu(x).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device


@library.custom_op("altup::geglu", mutates_args=())
@on_its_device
def geglu_op(h: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """h: [..., 2·n], contiguous → [..., n]; dropout has a seed [1], int64, or in its place the factors of each
    sequence, [..., 1, n], float32."""
    from altup.kernels.geglu.triton import forward

    hidden = _empty_hidden(h)
    forward(hidden, h, seed, p)
    return hidden


@library.custom_op("altup::geglu_backward", mutates_args=())
@on_its_device
def geglu_backward_op(grad: Tensor, h: Tensor, seed: Tensor | None, p: float) -> Tensor:
    from altup.kernels.geglu.triton import backward

    d_h = torch.empty_like(h)
    backward(d_h, grad.contiguous(), h, seed, p)
    return d_h


@geglu_op.register_fake
def _empty_hidden(h: Tensor, *_: Any) -> Tensor:
    return h.new_empty(*h.shape[:-1], h.shape[-1] // 2)


@geglu_backward_op.register_fake
def _(grad: Tensor, h: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(h)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, seed, ctx.p = inputs
    ctx.save_for_backward(h, seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return geglu_backward_op(grad, *ctx.saved_tensors, ctx.p), None, None


geglu_op.register_autograd(_differentiate, setup_context=_save)
