"""Triton kernels of rotary positions. A program takes all heads of a token: it turns queries and keys and copies
values. Backward the gradients are turned the other way, back into one tensor."""

# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import power_of_two
from altup.kernels.operators import Gradients, operator

WARPS = 2


@operator("altup::rotary")
def rotary_op(
    joined: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """joined: [batch, tokens, (queries + 2·keys)·width]; results [batch, tokens, heads, width]; contiguous."""
    batch, tokens, total = joined.shape
    width = total // (queries + 2 * keys)
    q, k, v = results = tuple(joined.new_empty(batch, tokens, n, width) for n in (queries, keys, keys))
    yield results
    forward_kernel[(batch * tokens,)](
        q, k, v, joined, cosine, sine, cosine.numel() // (width // 2), **_shape(queries, keys, width)
    )


@operator("altup::rotary_backward")
def rotary_backward(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int
) -> Iterator[Tensor]:
    """Gradients [batch, tokens, heads, width], in any layout whose last dimension is contiguous."""
    batch, tokens, _, width = d_q.shape
    d_joined = d_q.new_empty(batch, tokens, (queries + 2 * keys) * width)
    yield d_joined
    grads = [x if x.stride(-1) == 1 else x.contiguous() for x in (d_q, d_k, d_v)]
    strides = [stride for x in grads for stride in x.stride()[:3]]
    backward_kernel[(batch * tokens,)](
        d_joined, *grads, cosine, sine, cosine.numel() // (width // 2), tokens, *strides,
        **_shape(queries, keys, width),
    )  # fmt: skip


@rotary_op.gradient
def _(
    d_q: Tensor, d_k: Tensor, d_v: Tensor, *, cosine: Tensor, sine: Tensor, queries: int, keys: int
) -> Gradients:
    return {"joined": rotary_backward(d_q, d_k, d_v, cosine, sine, queries, keys)}


def _shape(queries: int, keys: int, width: int) -> dict[str, int]:
    heads = power_of_two(queries + 2 * keys)
    return {
        "Q": queries, "K": keys, "D": width, "HEADS": heads, "HALF": power_of_two(width // 2), "num_warps": WARPS
    }  # fmt: skip


@triton.jit
def _angles(cosine, sine, token, period, pair, turned, inside, D: tl.constexpr):
    """Of each head's pairs; heads that are not turned have the angle 0."""
    at = (token % period) * (D // 2) + pair
    wanted = inside & turned
    return tl.load(cosine + at, mask=wanted, other=1.0), tl.load(sine + at, mask=wanted, other=0.0)


@triton.jit
def forward_kernel(
    q, k, v, joined, cosine, sine, period,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < Q + 2 * K) & (pair < D // 2)
    here = joined + token * ((Q + 2 * K) * D) + head * D + pair
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + D // 2, mask=inside, other=0.0).to(tl.float32)
    c, s = _angles(cosine, sine, token, period, pair, head < Q + K, inside, D)
    turned_first = (first * c - second * s).to(q.dtype.element_ty)
    turned_second = (second * c + first * s).to(q.dtype.element_ty)
    is_q, is_k = inside & (head < Q), inside & (head >= Q) & (head < Q + K)
    is_v = inside & (head >= Q + K)
    at = q + token * (Q * D) + head * D + pair
    tl.store(at, turned_first, mask=is_q)
    tl.store(at + D // 2, turned_second, mask=is_q)
    at = k + token * (K * D) + (head - Q) * D + pair
    tl.store(at, turned_first, mask=is_k)
    tl.store(at + D // 2, turned_second, mask=is_k)
    at = v + token * (K * D) + (head - Q - K) * D + pair
    tl.store(at, turned_first, mask=is_v)
    tl.store(at + D // 2, turned_second, mask=is_v)


@triton.jit
def backward_kernel(
    d_joined, d_q, d_k, d_v, cosine, sine, period, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, column = token // tokens, token % tokens
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < Q + 2 * K) & (pair < D // 2)
    is_q, is_k = inside & (head < Q), inside & (head >= Q) & (head < Q + K)
    is_v = inside & (head >= Q + K)
    at_q = d_q + row * q_row + column * q_token + head * q_head + pair
    at_k = d_k + row * k_row + column * k_token + (head - Q) * k_head + pair
    at_v = d_v + row * v_row + column * v_token + (head - Q - K) * v_head + pair
    first = tl.load(at_q, mask=is_q, other=0.0).to(tl.float32)
    first += tl.load(at_k, mask=is_k, other=0.0).to(tl.float32)
    first += tl.load(at_v, mask=is_v, other=0.0).to(tl.float32)
    second = tl.load(at_q + D // 2, mask=is_q, other=0.0).to(tl.float32)
    second += tl.load(at_k + D // 2, mask=is_k, other=0.0).to(tl.float32)
    second += tl.load(at_v + D // 2, mask=is_v, other=0.0).to(tl.float32)
    c, s = _angles(cosine, sine, token, period, pair, head < Q + K, inside, D)
    here = d_joined + token * ((Q + 2 * K) * D) + head * D + pair
    tl.store(here, (first * c + second * s).to(d_joined.dtype.element_ty), mask=inside)
    tl.store(here + D // 2, (second * c - first * s).to(d_joined.dtype.element_ty), mask=inside)
