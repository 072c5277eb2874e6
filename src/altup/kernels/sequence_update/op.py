"""Sequence-AltUp's fused update as a custom operator of PyTorch, opaque to `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device

_GIVEN = "Tensor x, Tensor computed, Tensor a, Tensor b, int stride"


@library.custom_op("altup::sequence_update", mutates_args=(), schema=f"({_GIVEN}) -> Tensor")
@on_its_device
def sequence_update_op(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Tensor:
    """x: [batch, T, d], computed: [batch, ⌈T/stride⌉, d], a: [2] and b: [1] in float32."""
    from altup.kernels.sequence_update import triton as kernels

    out = _like(x)
    kernels.forward(out, x, computed, a, b, stride)
    return out


@library.custom_op(
    "altup::sequence_update_backward", mutates_args=(), schema=f"(Tensor grad, {_GIVEN}) -> Tensor[]"
)
@on_its_device
def sequence_update_backward(
    grad: Tensor, x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int
) -> list[Tensor]:
    """The gradients of x, computed, a and b."""
    from altup.kernels.sequence_update import triton as kernels

    gradients = [_like(tensor) for tensor in (x, computed, a, b)]
    dx, d_computed, da, db = gradients
    kernels.backward(dx, d_computed, da, db, grad, x, computed, a, b, stride)
    return gradients


@sequence_update_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return _like(x)


@sequence_update_backward.register_fake
def _(grad: Tensor, x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> list[Tensor]:
    return [_like(tensor) for tensor in (x, computed, a, b)]


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.stride = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    return *sequence_update_backward(grad, *ctx.saved_tensors, ctx.stride), None


sequence_update_op.register_autograd(_differentiate, setup_context=_save)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)
