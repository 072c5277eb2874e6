"""Triton kernels of the prediction: one pass over the state forward, one backward.

With c = A·m, the upstream gradients G, and ⟨·,·⟩ the sum over a token's columns:

    forward     x̂ⁱ = xⁱ + Σⱼ cᵢⱼ xʲ
    backward    dcᵢⱼ = ⟨Gⁱ, xʲ⟩,    dm = Aᵀ·dc,    dxʲ = Gʲ + Σᵢ cᵢⱼ Gⁱ, and for block a what came through m

The gradients of A, router and norm are sums over tokens of what the backward kernel writes for each (`op.py`).
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
    dot,
    load,
    load_blocks,
    load_numbers,
    route,
    route_backward,
    slope_of_tanh,
    store,
    store_numbers,
    tanh_of,
    tile,
    tiles,
    times,
    transposed_times,
    zeros,
)
from altup.kernels.launch import Config, flat

# As for `altup_update_dynamic`, whose loops these are; not timed yet.
FORWARD = Config(warps=2, vectors=1)
BACKWARD = Config(warps=1, vectors=1)


@triton.jit
def _forward_kernel(
    outs, routed, inverses, xs, weight, norm, A, d, eps,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    numbers = route(xs[ACTIVE], token, d, weight, norm, eps, K, BLOCK, WIDTH)
    store_numbers(routed, token * K, numbers, K)
    tl.store(inverses + token, numbers[K])
    c = times(A, tanh_of(numbers, K), K * K, K)
    lanes = tile(BLOCK, WIDTH)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        x = load_blocks(xs, start, lanes, mask, K)
        for i in tl.static_range(K):
            row = x[i]
            for j in tl.static_range(K):
                row += c[i * K + j] * x[j]
            store(outs[i], start, lanes, row, mask)


@triton.jit
def _backward_kernel(
    dxs, dc, d_routed, grads, xs, weight, norm, A, routed, inverses, d,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    numbers = load_numbers(routed, token * K, K)
    inverse = tl.load(inverses + token)
    m = tanh_of(numbers, K)
    c = times(A, m, K * K, K)
    sums = zeros(K * K, BLOCK // WIDTH)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        grad = load_blocks(grads, start, lanes, mask, K)
        x = load_blocks(xs, start, lanes, mask, K)
        new = ()
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                new = new + (sums[i * K + j] + tl.sum(grad[i] * x[j], axis=1),)
        sums = new
        for j in tl.static_range(K):
            if j != ACTIVE:
                dx = grad[j]
                for i in tl.static_range(K):
                    dx += c[i * K + j] * grad[i]
                store(dxs[j], start, lanes, dx, mask)

    slopes = ()
    for k in tl.static_range(K * K):
        slopes = slopes + (tl.sum(sums[k]),)
    store_numbers(dc, token * (K * K), slopes, K * K)
    d_numbers = slope_of_tanh(transposed_times(A, slopes, K * K, K), m, K)
    store_numbers(d_routed, token * K, d_numbers, K)
    along = dot(d_numbers, numbers, K)
    for column in range(0, d, BLOCK):  # once more, out of the cache: the active block waited for all sums
        start = token * d + column
        mask = lanes < d - column
        value = load(xs[ACTIVE], start, lanes, mask)
        dx = route_backward(value, d_numbers, along, inverse, d, weight, norm, column, lanes, mask, K)
        dx += load(grads[ACTIVE], start, lanes, mask)
        for i in tl.static_range(K):
            dx += c[i * K + ACTIVE] * load(grads[i], start, lanes, mask)
        store(dxs[ACTIVE], start, lanes, dx, mask)


def forward(
    outs: Sequence[Tensor],
    routed: Tensor,
    inverses: Tensor,
    xs: Sequence[Tensor],
    weight: Tensor,
    norm: Tensor,
    A: Tensor,
    active: int,
    eps: float,
) -> None:
    """Fill the predicted blocks `outs`, the router's numbers [..., K] and 1 / rms [...], all contiguous."""
    xs, (weight, norm, A) = flat(xs), flat((weight, norm, A))
    if inverses.numel():
        _forward_kernel[(inverses.numel(),)](
            tuple(outs), routed, inverses, xs, weight, norm, A, xs[0].shape[-1], eps,
            ACTIVE=active, K=len(xs), **tiles(FORWARD, xs[0]),
        )  # fmt: skip


def backward(
    dxs: Sequence[Tensor],
    dc: Tensor,
    d_routed: Tensor,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    weight: Tensor,
    norm: Tensor,
    A: Tensor,
    routed: Tensor,
    inverses: Tensor,
    active: int,
) -> None:
    """Fill the blocks' gradients, and those of c: [..., K²] and of the router's numbers: [..., K]."""
    grads, xs, (weight, norm, A) = flat(grads), flat(xs), flat((weight, norm, A))
    if inverses.numel():
        _backward_kernel[(inverses.numel(),)](
            tuple(dxs), dc, d_routed, grads, xs, weight, norm, A, routed, inverses, xs[0].shape[-1],
            ACTIVE=active, K=len(xs), **tiles(BACKWARD, xs[0]),
        )  # fmt: skip
