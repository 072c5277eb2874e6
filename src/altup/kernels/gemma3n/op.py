"""The kernels of Gemma 3n's AltUp as custom operators of PyTorch, opaque to `torch.compile`.

A state comes as a list of K blocks or as a list of one stacked tensor. What a token's backward pass leaves for the
weights, a few numbers for each token, is summed over the tokens by ordinary matrix products, and only for weights
that want it: under LoRA none of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device

_ROUTER = "Tensor weight, Tensor norm, float eps"


@library.custom_op(
    "altup::gemma3n_predict",
    mutates_args=(),
    schema=f"(Tensor[] state, {_ROUTER}, Tensor A, int active, bool stacked) -> (Tensor[], Tensor, Tensor)",
)
@on_its_device
def predict(
    state: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float, A: Tensor, active: int, stacked: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The predicted blocks, the router's numbers [..., K] before the tanh, and 1 / rms of block a: [...]."""
    from altup.kernels.gemma3n import predict_kernels as kernels

    new, routed, inverses = predicted = _predicted(state, weight, stacked)
    kernels.forward(_blocks(new), routed, inverses, _blocks(state), weight, norm, A, active, eps)
    return predicted


def _predicted(state: Sequence[Tensor], weight: Tensor, stacked: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    block, K = _blocks(state)[0], len(weight)
    new = [block.new_empty(K, *block.shape)] if stacked else [block.new_empty(block.shape) for _ in range(K)]
    return new, *_numbers(block, K)


def _numbers(block: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Places for the router's numbers and 1 / rms."""
    tokens = block.shape[:-1]
    return block.new_empty(*tokens, K, dtype=torch.float32), block.new_empty(tokens, dtype=torch.float32)


@predict.register_fake
def _(
    state: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float, A: Tensor, active: int, stacked: bool
) -> Any:
    return _predicted(state, weight, stacked)


@library.custom_op(
    "altup::gemma3n_predict_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] state, Tensor weight, Tensor norm, Tensor A, Tensor routed, "
    "Tensor inverses, int active) -> (Tensor[], Tensor, Tensor)",
)
@on_its_device
def predict_backward(
    grads: Sequence[Tensor],
    state: Sequence[Tensor],
    weight: Tensor,
    norm: Tensor,
    A: Tensor,
    routed: Tensor,
    inverses: Tensor,
    active: int,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The gradients of the state (a list like it), of A·m: [..., K²], and of the router's numbers: [..., K]."""
    from altup.kernels.gemma3n import predict_kernels as kernels

    d_state, dc, d_routed = gradients = _predict_gradients(state, routed)
    kernels.backward(
        _blocks(d_state), dc, d_routed, _blocks(grads), _blocks(state), weight, norm, A, routed, inverses, active
    )
    return gradients


def _predict_gradients(state: Sequence[Tensor], routed: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    K = routed.shape[-1]
    dc = routed.new_empty(*routed.shape[:-1], K * K)
    return [t.new_empty(t.shape) for t in state], dc, routed.new_empty(routed.shape)


@predict_backward.register_fake
def _(
    grads: Sequence[Tensor], state: Sequence[Tensor], weight: Any, norm: Any, A: Any, routed: Tensor, *_: Any
) -> Any:
    return _predict_gradients(state, routed)


def _save_predict(ctx: Any, inputs: tuple, output: tuple) -> None:
    state, weight, norm, _, A, ctx.active, _ = inputs
    _, routed, inverses = output
    ctx.mark_non_differentiable(routed, inverses)
    ctx.wanted = [t.requires_grad for t in (weight, norm, A)]
    ctx.save_for_backward(*state, weight, norm, A, routed, inverses)


def _differentiate_predict(ctx: Any, grads: list[Tensor], *_: Any) -> tuple:
    *state, weight, norm, A, routed, inverses = ctx.saved_tensors
    d_state, dc, d_routed = predict_backward(grads, state, weight, norm, A, routed, inverses, ctx.active)
    active = _blocks(state)[ctx.active]
    d_weight, d_norm = _router_gradients(active, d_routed, inverses, weight, norm, *ctx.wanted[:2])
    dA = _outer_sum(dc, torch.tanh(routed)).to(A.dtype) if ctx.wanted[2] else None
    return d_state, d_weight, d_norm, None, dA, None, None


predict.register_autograd(_differentiate_predict, setup_context=_save_predict)


@library.custom_op(
    "altup::gemma3n_correction",
    mutates_args=(),
    schema=f"(Tensor y, {_ROUTER}, Tensor C, Tensor? predicted, Tensor? scale, int active) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
@on_its_device
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
    from altup.kernels.gemma3n import correct_kernels as kernels

    g, z, routed, inverses = made = _corrected(y, C, predicted)
    into = None if predicted is None else z
    kernels.coefficients(g, into, routed, inverses, y, predicted, scale, weight, norm, C, active, eps)
    return made


def _corrected(y: Tensor, C: Tensor, predicted: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routed, inverses = _numbers(y, len(C))
    return torch.empty_like(routed), y.new_empty(0 if predicted is None else y.shape), routed, inverses


@correction.register_fake
def _(y: Tensor, weight: Any, norm: Any, eps: float, C: Tensor, predicted: Tensor | None, *_: Any) -> Any:
    return _corrected(y, C, predicted)


@library.custom_op(
    "altup::gemma3n_correction_backward",
    mutates_args=(),
    schema="(Tensor dg, Tensor? dz, Tensor y, Tensor weight, Tensor norm, Tensor C, Tensor? predicted, "
    "Tensor? scale, Tensor g, Tensor routed, Tensor inverses, int active, bool scale_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@on_its_device
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
    from altup.kernels.gemma3n import correct_kernels as kernels

    dy, d_predicted, d_g, d_routed, d_scale = _correction_gradients(y, predicted, g, scale_grad)
    kernels.coefficients_backward(
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
        dg, None if predicted is None else dz, y, weight, norm, C, predicted, scale, g, routed, inverses,
        ctx.active, ctx.wanted[3],
    )  # fmt: skip
    d_weight, d_norm = _router_gradients(y, d_routed, inverses, weight, norm, *ctx.wanted[:2])
    dC = _outer_sum(d_g, torch.tanh(routed)).to(C.dtype) if ctx.wanted[2] else None
    return (
        dy, d_weight, d_norm, None, dC, None if predicted is None else d_predicted,
        d_scale.to(scale.dtype) if ctx.wanted[3] else None, None,
    )  # fmt: skip


correction.register_autograd(_differentiate_correction, setup_context=_save_correction)


@library.custom_op(
    "altup::gemma3n_correct",
    mutates_args=(),
    schema="(Tensor[] predicted, Tensor y, Tensor g, Tensor? branch, Tensor? norm, int active, float eps) "
    "-> (Tensor, Tensor)",
)
@on_its_device
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
    kernels.blocks(new.unbind(0), inverses, _blocks(predicted), y, g, branch, norm, active, eps)
    return new, inverses


def _new(y: Tensor, g: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    return y.new_empty(g.shape[-1], *y.shape), g.new_empty(0 if branch is None else y.shape[:-1])


@correct.register_fake
def _(predicted: Any, y: Tensor, g: Tensor, branch: Tensor | None, *_: Any) -> Any:
    return _new(y, g, branch)


@library.custom_op(
    "altup::gemma3n_correct_backward",
    mutates_args=(),
    schema="(Tensor grads, Tensor predicted, Tensor y, Tensor g, Tensor? branch, Tensor? norm, Tensor inverses, "
    "int active, bool norm_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@on_its_device
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
    kernels.blocks_backward(
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
    ctx.save_for_backward(_blocks(predicted)[ctx.active], y, g, branch, norm, output[1])


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


@library.custom_op(
    "altup::gemma3n_match",
    mutates_args=(),
    schema="(Tensor h, Tensor[] projected, bool mean) -> (Tensor, Tensor)",
)
@on_its_device
def match(h: Tensor, projected: Sequence[Tensor], mean: bool) -> tuple[Tensor, Tensor]:
    """The matched blocks [K, ..., d], or their mean [..., d], and each token's magnitudes [..., K]."""
    from altup.kernels.gemma3n import ends_kernels as kernels

    out, sizes = _matched(h, projected, mean)
    kernels.forward([out] if mean else out.unbind(0), sizes, h, projected, mean)
    return out, sizes


def _matched(h: Tensor, projected: Sequence[Tensor], mean: bool) -> tuple[Tensor, Tensor]:
    K = 1 + len(projected)
    return h.new_empty(h.shape if mean else (K, *h.shape)), h.new_empty(*h.shape[:-1], K, dtype=torch.float32)


@match.register_fake
def _(h: Tensor, projected: Sequence[Tensor], mean: bool) -> Any:
    return _matched(h, projected, mean)


@library.custom_op(
    "altup::gemma3n_match_backward",
    mutates_args=(),
    schema="(Tensor grads, Tensor h, Tensor[] projected, Tensor sizes, bool mean) -> (Tensor, Tensor[])",
)
@on_its_device
def match_backward(
    grads: Tensor, h: Tensor, projected: Sequence[Tensor], sizes: Tensor, mean: bool
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of h and of what was projected."""
    from altup.kernels.gemma3n import ends_kernels as kernels

    dh, d_projected = gradients = _match_gradients(h, projected)
    kernels.backward(dh, d_projected, [grads] if mean else grads.unbind(0), sizes, h, projected, mean)
    return gradients


def _match_gradients(h: Tensor, projected: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return h.new_empty(h.shape), [p.new_empty(p.shape) for p in projected]


@match_backward.register_fake
def _(grads: Tensor, h: Tensor, projected: Sequence[Tensor], *_: Any) -> Any:
    return _match_gradients(h, projected)


def _save_match(ctx: Any, inputs: tuple, output: tuple) -> None:
    h, projected, ctx.mean = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(h, *projected, output[1])


def _differentiate_match(ctx: Any, grads: Tensor, *_: Any) -> tuple:
    h, *projected, sizes = ctx.saved_tensors
    return *match_backward(grads, h, projected, sizes, ctx.mean), None


match.register_autograd(_differentiate_match, setup_context=_save_match)


def _blocks(state: Sequence[Tensor]) -> Sequence[Tensor]:
    """The K blocks of either kind of state; K ≥ 2."""
    return state[0].unbind(0) if len(state) == 1 else state


def _router_gradients(
    x: Tensor, d_routed: Tensor, inverses: Tensor, weight: Tensor, norm: Tensor, weight_grad: bool, norm_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the router and of its norm's scale, from Z = Σ over tokens of (∂routed / rms) ⊗ x: [K, d]."""
    if not (weight_grad or norm_grad):
        return None, None
    Z = _outer_sum(d_routed * (inverses / x.shape[-1]).unsqueeze(-1), x)
    return (
        (Z * norm.float()).to(weight.dtype) if weight_grad else None,
        (Z * weight.float()).sum(dim=0).to(norm.dtype) if norm_grad else None,
    )


def _outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """Σ over tokens of a ⊗ b: [..., n], [..., m] → [n, m] in float32; a is rounded to b's dtype."""
    a, b = a.flatten(0, -2).t(), b.flatten(0, -2)
    with torch.autocast(b.device.type, enabled=False):
        if b.is_cuda and b.dtype != torch.float32:
            return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
        return a.float() @ b.float()
