"""The kernels as a custom operator of PyTorch.

With weights P, Z what dropout multiplies them by, and dO the gradient of the result O,

    dV = (P∘Z)ᵀ·dO,   dS = P ∘ (Z ∘ dO·Vᵀ − rowsum(dO∘O)),   dQ = dS·K,   dK = dSᵀ·Q,   d_bias[d] = Σ dS[i, i + d],

and both backward kernels recompute the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from altup.kernels.attention.forward import forward
from altup.kernels.attention.keys_backward import keys_backward
from altup.kernels.attention.launch import AttentionCall, apart, empty_heads
from altup.kernels.attention.queries_backward import distance_sums, queries_backward
from altup.kernels.attention.slots import slot
from altup.kernels.operators import Gradients, operator


@operator("altup::attention")
def attend(
    parts: Sequence[Tensor], by_distance: Tensor | None, query_segments: Tensor | None,
    key_segments: Tensor | None, seed: Tensor | None, peaks: Tensor | None, causal: bool, dropout: float,
    scale: float, constant_beyond: int | None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The result [B, H, Q, D], a view of [B, Q, H, D], and what the backward pass needs to know of it [B, H, Q].

    parts: queries, keys and values [B, H, N, D]; or, where they come from fewer products, [B, N, 3, H, D], or
    [B, Q, 1, H, D] and [B, K, 2, H, D]. Their gradients have the same shapes, so that nothing has to be joined
    before the products of the backward pass. Rows and the other tensors are contiguous; segments are int32, and
    dropout has a seed, or its decisions in that place (`AttentionCall`). What comes back as the gradient of
    `peaks`, float32 [slots], are the largest numbers of the parts' gradients, for who will round them.
    """
    call = AttentionCall(
        *apart(parts), by_distance, query_segments, key_segments, seed, causal, dropout, scale, constant_beyond
    )
    out, lse = empty_heads(call.q), call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    yield out, lse
    forward(call, out, lse)


@operator("altup::attention_backward")
def attend_backward(
    d_out: Tensor, out: Tensor, lse: Tensor, parts: Sequence[Tensor], by_distance: Tensor | None,
    query_segments: Tensor | None, key_segments: Tensor | None, seed: Tensor | None, causal: bool, dropout: float,
    scale: float, constant_beyond: int | None, bias_grad: bool, slots: int,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:  # fmt: skip
    """The gradients of the parts and, where wanted, of by_distance and peaks; else they are empty."""
    call = AttentionCall(
        *apart(parts), by_distance, query_segments, key_segments, seed, causal, dropout, scale, constant_beyond
    )
    gradients = [empty_heads(part) if part.dim() == 4 else slot(part) for part in parts]
    d_bias = lse.new_empty(by_distance.shape if bias_grad and by_distance is not None else 0)
    peaks = lse.new_zeros(slots)
    yield gradients, d_bias, peaks
    dq, dk, dv = apart(gradients)
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    largest = peaks.view(torch.int32) if slots else None
    pairs, strips = queries_backward(call, d_out, out, lse, bias_grad, dq, largest)
    keys_backward(call, d_out, pairs, dk, dv, largest)
    if strips is not None:
        distance_sums(call, strips, d_bias)


@attend.gradient
def _(
    d_out: Tensor, _lse: None, *, out: Tensor, lse: Tensor, parts: list[Tensor], by_distance: Tensor | None,
    query_segments: Tensor | None, key_segments: Tensor | None, seed: Tensor | None, peaks: Tensor | None,
    causal: bool, dropout: float, scale: float, constant_beyond: int | None, needs: set[str],
) -> Gradients:  # fmt: skip
    gradients, d_bias, largest = attend_backward(
        d_out, out, lse, parts, by_distance, query_segments, key_segments, seed, causal, dropout, scale,
        constant_beyond, "by_distance" in needs, 0 if peaks is None else peaks.numel(),
    )  # fmt: skip
    return {
        "parts": gradients,
        "by_distance": d_bias if "by_distance" in needs else None,
        "peaks": None if peaks is None else largest,
    }
