"""The kernels of a layer's additions, with the norms around them, as custom operators of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from altup.kernels.operators import operator

WIDEST = 8192  # columns, which a program holds at once


@operator(
    "altup::gemma3n_residual",
    "(Tensor x, Tensor a, Tensor a_norm, Tensor? n, Tensor? r, Tensor? r_norm, Tensor? norm, float eps) "
    "-> (Tensor, Tensor, Tensor)",
)
def residual(
    x: Tensor,
    a: Tensor,
    a_norm: Tensor,
    n: Tensor | None,
    r: Tensor | None,
    r_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, normed where there is a `norm` (else empty), and 1 / rms of a, r and the sum: [..., 3]."""
    from altup.kernels.gemma3n import residual_kernels as kernels

    out, normed, inverses = made = _made(x, norm)
    kernels.forward(out, None if norm is None else normed, inverses, x, a, a_norm, n, r, r_norm, norm, eps)
    return made


def _made(x: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if norm is None else x.shape),
        x.new_empty(*x.shape[:-1], 3, dtype=torch.float32),
    )


@residual.register_fake
def _(x: Tensor, a: Any, a_norm: Any, n: Any, r: Any, r_norm: Any, norm: Tensor | None, eps: Any) -> Any:
    return _made(x, norm)


@operator(
    "altup::gemma3n_residual_backward",
    "(Tensor grad, Tensor? d_normed, Tensor? out, Tensor a, Tensor a_norm, Tensor? r, Tensor? r_norm, "
    "Tensor? norm, Tensor inverses) -> (Tensor, Tensor, Tensor, Tensor)",
)
def residual_backward(
    grad: Tensor,
    d_normed: Tensor | None,
    out: Tensor | None,
    a: Tensor,
    a_norm: Tensor,
    r: Tensor | None,
    r_norm: Tensor | None,
    norm: Tensor | None,
    inverses: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x and n (empty where it is `grad`), of a and r, and of the norms' weights: [3, d]."""
    from altup.kernels.gemma3n import residual_kernels as kernels

    dx, da, dr = _gradients(a, r, norm)
    changes = r is not None or norm is not None
    sums = kernels.backward(
        dx if changes else None, da, None if r is None else dr, grad, d_normed, out, a, a_norm, r, r_norm, norm,
        inverses,
    )  # fmt: skip
    return dx, da, dr, sums


def _gradients(a: Tensor, r: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    changes = r is not None or norm is not None
    return (
        a.new_empty(a.shape if changes else 0),
        a.new_empty(a.shape),
        a.new_empty(0 if r is None else a.shape),
    )


@residual_backward.register_fake
def _(
    grad: Any, d_normed: Any, out: Any, a: Tensor, a_norm: Any, r: Tensor | None, r_norm: Any, norm: Any, *_: Any
) -> Any:
    return *_gradients(a, r, norm), a.new_empty(3, a.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, a, a_norm, _, r, r_norm, norm, _ = inputs
    out, _, inverses = output
    ctx.mark_non_differentiable(inverses)
    ctx.save_for_backward(None if norm is None else out, a, a_norm, r, r_norm, norm, inverses)


def _differentiate(ctx: Any, grad: Tensor, d_normed: Tensor, *_: Any) -> tuple:
    out, a, a_norm, r, r_norm, norm, inverses = ctx.saved_tensors
    dx, da, dr, sums = residual_backward(
        grad, None if norm is None else d_normed, out, a, a_norm, r, r_norm, norm, inverses
    )
    if not dx.numel():
        dx = grad
    of_a, of_r, of_out = (
        None if weight is None else total.to(weight.dtype)
        for total, weight in zip(sums, (a_norm, r_norm, norm), strict=True)
    )
    return dx, da, of_a, None if r is None else dx, None if r is None else dr, of_r, of_out, None


residual.register_autograd(_differentiate, setup_context=_save)


@operator("altup::gemma3n_norm", "(Tensor x, Tensor norm, float eps) -> (Tensor, Tensor)")
def norm_alone(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x normed, and `residual`'s last, of which only the third number is filled."""
    from altup.kernels.gemma3n import residual_kernels as kernels

    normed, inverses = made = _normed(x)
    kernels.forward(None, normed, inverses, x, None, None, None, None, None, norm, eps)
    return made


def _normed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 3, dtype=torch.float32)


@norm_alone.register_fake
def _(x: Tensor, norm: Tensor, eps: float) -> Any:
    return _normed(x)


@operator(
    "altup::gemma3n_norm_backward",
    "(Tensor grad, Tensor d_normed, Tensor x, Tensor norm, Tensor inverses) -> (Tensor, Tensor)",
)
def norm_alone_backward(
    grad: Tensor, d_normed: Tensor, x: Tensor, norm: Tensor, inverses: Tensor
) -> tuple[Tensor, Tensor]:
    """`grad` and what comes through the norm, added; and the gradient of the norm's weight."""
    from altup.kernels.gemma3n import residual_kernels as kernels

    dx = x.new_empty(x.shape)
    sums = kernels.backward(dx, None, None, grad, d_normed, x, None, None, None, None, norm, inverses)
    return dx, sums[2].to(norm.dtype)


@norm_alone_backward.register_fake
def _(grad: Any, d_normed: Any, x: Tensor, norm: Tensor, inverses: Any) -> Any:
    return x.new_empty(x.shape), norm.new_empty(norm.shape)


class NormBeside(torch.autograd.Function):
    """x and x normed. Whoever reads x reads this one: the backward pass then adds what comes back along with what
    comes through the norm. An operator may not give back what it was given, so this is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, inverses = norm_alone(x, norm, eps)
        ctx.save_for_backward(x, norm, inverses)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_normed: Tensor) -> tuple:
        return *norm_alone_backward(grad, d_normed, *ctx.saved_tensors), None
