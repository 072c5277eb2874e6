"""The kernels of Gemma 3n's AltUp as custom operators of PyTorch, opaque to `torch.compile`.

A state comes as a list of K blocks or as a list of one stacked tensor. What a token's backward pass leaves for the
weights, a few numbers for each token, is summed over the tokens by ordinary matrix products, and only for weights
that want it: under LoRA none of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from altup.kernels.gemma3n.sums import ROUTER, blocks_of, outer_sum, router_gradients, router_numbers
from altup.kernels.operators import operator


@operator(
    "altup::gemma3n_predict",
    f"(Tensor[] state, {ROUTER}, Tensor A, int active, bool stacked) -> (Tensor[], Tensor, Tensor)",
)
def predict(
    state: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float, A: Tensor, active: int, stacked: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The predicted blocks, the router's numbers [..., K] before the tanh, and 1 / rms of block a: [...]."""
    from altup.kernels.gemma3n import predict_kernels as kernels

    new, routed, inverses = predicted = _predicted(state, weight, stacked)
    kernels.forward(blocks_of(new), routed, inverses, blocks_of(state), weight, norm, A, active, eps)
    return predicted


def _predicted(state: Sequence[Tensor], weight: Tensor, stacked: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    block, K = blocks_of(state)[0], len(weight)
    new = [block.new_empty(K, *block.shape)] if stacked else [block.new_empty(block.shape) for _ in range(K)]
    return new, *router_numbers(block, K)


@predict.register_fake
def _(
    state: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float, A: Tensor, active: int, stacked: bool
) -> Any:
    return _predicted(state, weight, stacked)


@operator(
    "altup::gemma3n_predict_backward",
    "(Tensor[] grads, Tensor[] state, Tensor weight, Tensor norm, Tensor A, Tensor routed, "
    "Tensor inverses, int active) -> (Tensor[], Tensor, Tensor)",
)
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
        blocks_of(d_state),
        dc,
        d_routed,
        blocks_of(grads),
        blocks_of(state),
        weight,
        norm,
        A,
        routed,
        inverses,
        active,
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
    active = blocks_of(state)[ctx.active]
    d_weight, d_norm = router_gradients(active, d_routed, inverses, weight, norm, *ctx.wanted[:2])
    dA = outer_sum(dc, torch.tanh(routed)).to(A.dtype) if ctx.wanted[2] else None
    return d_state, d_weight, d_norm, None, dA, None, None


predict.register_autograd(_differentiate_predict, setup_context=_save_predict)


@operator("altup::gemma3n_match", "(Tensor h, Tensor[] projected, bool mean) -> (Tensor, Tensor)")
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


@operator(
    "altup::gemma3n_match_backward",
    "(Tensor grads, Tensor h, Tensor[] projected, Tensor sizes, bool mean) -> (Tensor, Tensor[])",
)
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
