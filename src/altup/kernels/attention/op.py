"""The kernels as a custom operator of PyTorch: opaque to `torch.compile`, with its gradient registered.

With weights P, Z what dropout multiplies them by, and dO the gradient of the result O,

    dV = (P∘Z)ᵀ·dO,   dS = P ∘ (Z ∘ dO·Vᵀ − rowsum(dO∘O)),   dQ = dS·K,   dK = dSᵀ·Q,   d_bias[d] = Σ dS[i, i + d],

and both backward kernels recompute the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.attention.launch import AttentionCall, empty_heads
from altup.kernels.launch import on_its_device


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

    The rows of q, k and v, and the other tensors, are contiguous; segments are int32, and dropout has a seed.
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
    from altup.kernels.attention.keys_backward import keys_backward
    from altup.kernels.attention.queries_backward import distance_sums, queries_backward

    problem = AttentionCall(
        q, k, v, by_distance, query_segments, key_segments, seed, causal, dropout, scale, constant_beyond
    )
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    dq, delta, strips = queries_backward(problem, d_out, out, lse, bias_grad)
    dk, dv = keys_backward(problem, d_out, lse, delta)
    d_bias = lse.new_empty(0) if strips is None else distance_sums(problem, strips)
    return dq, dk, dv, d_bias


@attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@attend_backward.register_fake
def _(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_distance: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias_grad = rest[-1]
    d_bias = lse.new_empty(by_distance.shape if bias_grad and by_distance is not None else 0)
    return empty_heads(q), empty_heads(k), empty_heads(v), d_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:7], inputs[7:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, d_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    bias_grad = ctx.needs_input_grad[3]
    dq, dk, dv, d_bias = attend_backward(d_out, *ctx.saved_tensors, *ctx.settings, bias_grad)
    return dq, dk, dv, d_bias if bias_grad else None, *[None] * 7


attend.register_autograd(_backward, setup_context=_setup_context)
