"""The kernels of queries' and keys' norm and rotary positions as custom operators of PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from altup.kernels.operators import operator


@operator("altup::gemma3n_rotary", "(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor")
def rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x normed and turned: [batch, tokens, heads, D]."""
    from altup.kernels.gemma3n import rotary_kernels as kernels

    out = x.new_empty(x.shape)
    kernels.forward(out, x, weight, cos, sin, eps)
    return out


@rotary.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@operator(
    "altup::gemma3n_rotary_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
)
def rotary_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    from altup.kernels.gemma3n import rotary_kernels as kernels

    dx = x.new_empty(x.shape)
    return dx, kernels.backward(dx, grad, x, weight, cos, sin, eps).to(weight.dtype)


@rotary_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, cos, sin, ctx.eps = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    return *rotary_backward(grad, *ctx.saved_tensors, ctx.eps), None, None, None


rotary.register_autograd(_differentiate, setup_context=_save)
