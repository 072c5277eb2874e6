"""The kernels of Gemma 3n's correction as custom operators of PyTorch: its coefficients, and the new blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from altup.kernels.gemma3n.sums import ROUTER, blocks_of, outer_sum, router_gradients, router_numbers
from altup.kernels.operators import operator


@operator(
    "altup::gemma3n_correction",
    f"(Tensor y, {ROUTER}, Tensor C, Tensor? predicted, Tensor? scale, int active) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def correction(
    y: Tensor,
    weight: Tensor,
    norm: Tensor,
    eps: float,
    C: Tensor,
    predicted: Tensor | None,
    scale: Tensor | None,
    active: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g: [..., K], the corrected active block times scale (or empty), and `predict`'s last two."""
    from altup.kernels.gemma3n import coefficients_kernels as kernels

    g, z, routed, inverses = made = _corrected(y, C, predicted)
    into = None if predicted is None else z
    kernels.forward(g, into, routed, inverses, y, predicted, scale, weight, norm, C, active, eps)
    return made


def _corrected(y: Tensor, C: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routed, inverses = router_numbers(y, len(C))
    return torch.empty_like(routed), y.new_empty(0 if predicted is None else y.shape), routed, inverses


@correction.register_fake
def _(y: Tensor, weight: Any, norm: Any, eps: float, C: Tensor, predicted: Tensor | None, *_: Any) -> Any:
    return _corrected(y, C, predicted)


@operator(
    "altup::gemma3n_correction_backward",
    "(Tensor dg, Tensor? dz, Tensor y, Tensor weight, Tensor norm, Tensor C, Tensor? predicted, "
    "Tensor? scale, Tensor g, Tensor routed, Tensor inverses, int active, bool scale_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def correction_backward(
    dg: Tensor,
    dz: Tensor | None,
    y: Tensor,
    weight: Tensor,
    norm: Tensor,
    C: Tensor,
    predicted: Tensor | None,
    scale: Tensor | None,
    g: Tensor,
    routed: Tensor,
    inverses: Tensor,
    active: int,
    scale_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, x̂ᵃ, g, the router's numbers and scale; what is not asked for is empty."""
    from altup.kernels.gemma3n import coefficients_kernels as kernels

    dy, d_predicted, d_g, d_routed, d_scale = _correction_gradients(y, predicted, g, scale_grad)
    kernels.backward(
        dy, None if predicted is None else d_predicted, d_g, d_routed,
        dg, dz, y, predicted, scale, weight, norm, C, g, routed, inverses, active,
    )  # fmt: skip
    if scale_grad and dz is not None and predicted is not None:
        d_scale = kernels.scale_sums(dz, y, predicted, g, active)
    return dy, d_predicted, d_g, d_routed, d_scale


def _correction_gradients(y: Tensor, predicted: Tensor | None, g: Tensor, scale_grad: bool) -> tuple[Tensor, ...]:
    return (
        y.new_empty(y.shape),
        y.new_empty(0) if predicted is None else predicted.new_empty(predicted.shape),
        g.new_empty(g.shape),
        g.new_empty(g.shape),
        g.new_empty(y.shape[-1] if scale_grad else 0),
    )


@correction_backward.register_fake
def _(
    dg: Any, dz: Any, y: Tensor, weight: Any, norm: Any, C: Any, predicted: Any, scale: Any, g: Tensor, *rest: Any
) -> Any:
    return _correction_gradients(y, predicted, g, rest[-1])


def _save_correction(ctx: Any, inputs: tuple, output: tuple) -> None:
    y, weight, norm, _, C, predicted, scale, ctx.active = inputs
    g, _, routed, inverses = output
    ctx.mark_non_differentiable(routed, inverses)
    ctx.wanted = [t is not None and t.requires_grad for t in (weight, norm, C, scale)]
    ctx.save_for_backward(y, weight, norm, C, predicted, scale, g, routed, inverses)


def _differentiate_correction(ctx: Any, dg: Tensor, dz: Tensor, *_: Any) -> tuple:
    y, weight, norm, C, predicted, scale, g, routed, inverses = ctx.saved_tensors
    dy, d_predicted, d_g, d_routed, d_scale = correction_backward(
        dg, None if predicted is None else dz, y, weight, norm, C, predicted, scale, g,
        routed, inverses, ctx.active, ctx.wanted[3],
    )  # fmt: skip
    d_weight, d_norm = router_gradients(y, d_routed, inverses, weight, norm, *ctx.wanted[:2])
    dC = outer_sum(d_g, torch.tanh(routed)).to(C.dtype) if ctx.wanted[2] else None
    return (
        dy, d_weight, d_norm, None, dC, None if predicted is None else d_predicted,
        d_scale.to(scale.dtype) if ctx.wanted[3] else None, None,
    )  # fmt: skip


correction.register_autograd(_differentiate_correction, setup_context=_save_correction)


@operator(
    "altup::gemma3n_correct",
    "(Tensor[] predicted, Tensor y, Tensor g, Tensor? branch, Tensor? norm, int active, float eps) "
    "-> (Tensor, Tensor)",
)
def correct(
    predicted: Sequence[Tensor],
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    active: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The new state [K, ..., d], and 1 / rms(branch): [...] (empty without one)."""
    from altup.kernels.gemma3n import correct_kernels as kernels

    new, inverses = _new(y, g, branch)
    kernels.forward(new.unbind(0), inverses, blocks_of(predicted), y, g, branch, norm, active, eps)
    return new, inverses


def _new(y: Tensor, g: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    return y.new_empty(g.shape[-1], *y.shape), g.new_empty(0 if branch is None else y.shape[:-1])


@correct.register_fake
def _(predicted: Any, y: Tensor, g: Tensor, branch: Tensor | None, *_: Any) -> Any:
    return _new(y, g, branch)


@operator(
    "altup::gemma3n_correct_backward",
    "(Tensor grads, Tensor predicted, Tensor y, Tensor g, Tensor? branch, Tensor? norm, Tensor inverses, "
    "int active, bool norm_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def correct_backward(
    grads: Tensor,
    predicted: Tensor,
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    inverses: Tensor,
    active: int,
    norm_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, x̂ᵃ (`predicted`), g, branch and norm; what is not asked for is empty."""
    from altup.kernels.gemma3n import correct_kernels as kernels

    dy, d_predicted, dg, d_branch, d_norm = _correct_gradients(y, predicted, g, branch, norm_grad)
    upstream = grads.unbind(0)
    kernels.backward(
        dy, d_predicted, dg, None if branch is None else d_branch,
        upstream, predicted, y, g, branch, norm, inverses, active,
    )  # fmt: skip
    if norm_grad and branch is not None:
        d_norm = kernels.norm_sums(upstream, branch, inverses)
    return dy, d_predicted, dg, d_branch, d_norm


def _correct_gradients(
    y: Tensor, predicted: Tensor, g: Tensor, branch: Tensor | None, norm_grad: bool
) -> tuple[Tensor, ...]:
    return (
        y.new_empty(y.shape),
        predicted.new_empty(predicted.shape),
        g.new_empty(g.shape),
        y.new_empty(0) if branch is None else branch.new_empty(branch.shape),
        g.new_empty(y.shape[-1] if norm_grad else 0),
    )


@correct_backward.register_fake
def _(
    grads: Any, predicted: Tensor, y: Tensor, g: Tensor, branch: Any, norm: Any, inverses: Any, *rest: Any
) -> Any:
    return _correct_gradients(y, predicted, g, branch, rest[-1])


def _save_correct(ctx: Any, inputs: tuple, output: tuple) -> None:
    predicted, y, g, branch, norm, ctx.active, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.stacked = predicted[0].dim() > y.dim()
    ctx.dtype = predicted[0].dtype
    ctx.norm_grad = norm is not None and norm.requires_grad
    ctx.save_for_backward(blocks_of(predicted)[ctx.active], y, g, branch, norm, output[1])


def _differentiate_correct(ctx: Any, grads: Tensor, *_: Any) -> tuple:
    active, y, g, branch, norm, inverses = ctx.saved_tensors
    dy, d_active, dg, d_branch, d_norm = correct_backward(
        grads, active, y, g, branch, norm, inverses, ctx.active, ctx.norm_grad
    )
    d_predicted = [grad.to(ctx.dtype) for grad in grads.unbind(0)]  # all but the active one's, as they came
    d_predicted[ctx.active] = d_active
    return (
        [torch.stack(d_predicted)] if ctx.stacked else d_predicted,
        dy, dg, None if branch is None else d_branch, d_norm.to(norm.dtype) if ctx.norm_grad else None, None, None,
    )  # fmt: skip


correct.register_autograd(_differentiate_correct, setup_context=_save_correct)
