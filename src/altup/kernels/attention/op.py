"""The kernels as a custom operator of PyTorch: opaque to `torch.compile`, with its gradient registered.

With weights P, Z what dropout multiplies them by, and dO the gradient of the result O,

    dV = (P∘Z)ᵀ·dO,   dS = P ∘ (Z ∘ dO·Vᵀ − rowsum(dO∘O)),   dQ = dS·K,   dK = dSᵀ·Q,   d_bias[d] = Σ dS[i, i + d],

and both backward kernels recompute the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.attention.launch import AttentionCall, empty_heads
from altup.kernels.attention.reference import SQUARE, WORDS
from altup.kernels.attention.slots import empty_slot, slot
from altup.kernels.launch import on_its_device


@library.custom_op("altup::attention_keep_bits", mutates_args=())
@on_its_device
def keep_bits_op(seed: Tensor, streams: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights dropout keeps under `seed` [1], int64, as bits (`keep_bits_reference`)."""
    from altup.kernels.attention.kept import keep_bits

    kept = _empty_bits(seed, streams, queries, keys)
    keep_bits(kept, seed, keys, dropout)
    return kept


@keep_bits_op.register_fake
def _empty_bits(seed: Tensor, streams: int, queries: int, keys: int, *_: object) -> Tensor:
    squares = -(-queries // SQUARE) * -(-keys // SQUARE)
    return seed.new_empty(streams, squares, WORDS, dtype=torch.int32)


@library.custom_op("altup::attention", mutates_args=())
@on_its_device
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
    constant_beyond: int | None,
) -> tuple[Tensor, Tensor]:
    """The result [B, H, Q, D], a view of [B, Q, H, D], and what the backward pass needs to know of it [B, H, Q].

    The rows of q, k and v, and the other tensors, are contiguous; segments are int32, and dropout has a seed, or
    its decisions in that place (`AttentionCall`).
    """
    from altup.kernels.attention.forward import forward

    return forward(
        AttentionCall(
            q, k, v, by_distance, query_segments, key_segments, seed, causal, dropout, scale, constant_beyond
        )
    )


@library.custom_op("altup::attention_backward", mutates_args=())
@on_its_device
def attend_backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
    constant_beyond: int | None,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and by_distance; the last is empty unless it is wanted."""
    problem = AttentionCall(
        q, k, v, by_distance, query_segments, key_segments, seed, causal, dropout, scale, constant_beyond
    )
    dq, dk, dv = empty_heads(q), empty_heads(k), empty_heads(v)
    return dq, dk, dv, _write_gradients(problem, d_out, out, lse, bias_grad, dq, dk, dv)


def _write_gradients(
    problem: AttentionCall,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    bias_grad: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    peaks: Tensor | None = None,
) -> Tensor:
    """The gradient of by_distance, or nothing."""
    from altup.kernels.attention.keys_backward import keys_backward
    from altup.kernels.attention.queries_backward import distance_sums, queries_backward

    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    pairs, strips = queries_backward(problem, d_out, out, lse, bias_grad, dq, peaks)
    keys_backward(problem, d_out, pairs, dk, dv, peaks)
    return lse.new_empty(0) if strips is None else distance_sums(problem, strips)


@attend.register_fake
def _like_output(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attend_backward.register_fake
def _like_gradients(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_heads(q), empty_heads(k), empty_heads(v), _empty_bias(lse, by_distance, rest[-1])


def _empty_bias(lse: Tensor, by_distance: Tensor | None, wanted: bool) -> Tensor:
    return lse.new_empty(by_distance.shape if wanted and by_distance is not None else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:7], inputs[7:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    bias_grad = ctx.needs_input_grad[3]
    dq, dk, dv, d_bias = attend_backward(d_out, *ctx.saved_tensors, *ctx.settings, bias_grad)
    return dq, dk, dv, d_bias if bias_grad else None, *[None] * 7


attend.register_autograd(_backward, setup_context=_setup_context)


_SETTINGS = (
    "Tensor? by_distance, Tensor? query_segments, Tensor? key_segments, Tensor? seed, bool causal, float dropout, "
    "float scale, int? constant_beyond"
)


@library.custom_op(
    "altup::attention_peaks",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}, Tensor peaks) -> (Tensor, Tensor)",
)
@on_its_device
def attend_peaks(*inputs: Any) -> tuple[Tensor, Tensor]:
    """As `attend`. What comes back as the gradient of `peaks`, float32 [slots], are the largest numbers of the
    gradients of q, k and v, for who will round them."""
    from altup.kernels.attention.forward import forward

    return forward(AttentionCall(*inputs[:-1]))


@library.custom_op(
    "altup::attention_peaks_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_SETTINGS}, bool bias_grad, "
    "int slots) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@on_its_device
def attend_peaks_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *call, bias_grad, slots = rest
    problem = AttentionCall(*call)
    dq, dk, dv = (empty_heads(x) for x in (problem.q, problem.k, problem.v))
    peaks = lse.new_zeros(slots)
    d_bias = _write_gradients(problem, d_out, out, lse, bias_grad, dq, dk, dv, peaks.view(torch.int32))
    return dq, dk, dv, d_bias, peaks


attend_peaks.register_fake(_like_output)


@attend_peaks_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *given, slots = inputs
    return *_like_gradients(*given), inputs[2].new_empty(slots)


def _setup_peaks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.slots = inputs[-1].numel()
    _setup_context(ctx, inputs[:-1], output)


def _backward_peaks(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    bias_grad = ctx.needs_input_grad[3]
    *gradients, d_bias, peaks = attend_peaks_backward(
        d_out, *ctx.saved_tensors, *ctx.settings, bias_grad, ctx.slots
    )
    return *gradients, d_bias if bias_grad else None, *[None] * 7, peaks


attend_peaks.register_autograd(_backward_peaks, setup_context=_setup_peaks)


@library.custom_op(
    "altup::attention_joined", mutates_args=(), schema=f"(Tensor[] parts, {_SETTINGS}) -> (Tensor, Tensor)"
)
@on_its_device
def attend_joined(
    parts: Sequence[Tensor],
    by_distance: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    seed: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """As `attend`, where queries, keys and values come from fewer products than three: [B, N, 3, H, D] holds all
    of them; or [B, Q, 1, H, D] and [B, K, 2, H, D]. Their gradients are of the same shapes, so that nothing has to
    be joined before the products of the backward pass."""
    from altup.kernels.attention.forward import forward

    tensors = by_distance, query_segments, key_segments, seed
    return forward(AttentionCall(*apart(parts), *tensors, *settings))


@library.custom_op(
    "altup::attention_joined_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor out, Tensor lse, Tensor[] parts, {_SETTINGS}, bool bias_grad) -> Tensor[]",
)
@on_its_device
def attend_joined_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, parts: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    """The gradients of the parts, and by_distance's, which is empty unless it is wanted."""
    *settings, bias_grad = rest
    problem = AttentionCall(*apart(parts), *settings)
    gradients = [slot(part) for part in parts]
    return [*gradients, _write_gradients(problem, d_out, out, lse, bias_grad, *apart(gradients))]


def apart(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [B, H, N, D]."""
    q, k, v = (one.transpose(1, 2) for part in parts for one in part.unbind(2))
    return q, k, v


@attend_joined.register_fake
def _(parts: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    B, Q, _several, H, D = parts[0].shape
    return parts[0].new_empty(B, Q, H, D).transpose(1, 2), parts[0].new_empty(B, H, Q, dtype=torch.float32)


@attend_joined_backward.register_fake
def _(
    d_out: Tensor, out: Tensor, lse: Tensor, parts: Sequence[Tensor], by_distance: Tensor | None, *rest: Any
) -> list[Tensor]:
    return [*map(empty_slot, parts), _empty_bias(lse, by_distance, rest[-1])]


def _setup_joined(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    parts, *tensors = inputs[:5]
    ctx.settings = inputs[5:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *parts, *tensors)


def _backward_joined(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    out, lse, *parts, by_distance, query_segments, key_segments, seed = ctx.saved_tensors
    bias_grad = ctx.needs_input_grad[1]
    tensors = by_distance, query_segments, key_segments, seed
    *gradients, d_bias = attend_joined_backward(d_out, out, lse, parts, *tensors, *ctx.settings, bias_grad)
    return gradients, d_bias if bias_grad else None, *[None] * 7


attend_joined.register_autograd(_backward_joined, setup_context=_setup_joined)
