"""Triton kernels of the prediction: one pass over the state forward, one backward.

With c = A·m, the upstream gradients G, and ⟨·,·⟩ the sum over a token's columns:

    forward     x̂ⁱ = xⁱ + Σⱼ cᵢⱼ xʲ
    backward    dcᵢⱼ = ⟨Gⁱ, xʲ⟩,    dm = Aᵀ·dc,    dxʲ = Gʲ + Σᵢ cᵢⱼ Gⁱ, and for block a what came through m

The gradients of A, router and norm are sums over tokens of what the backward kernel writes for each.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
    blocks_of,
    dot,
    load,
    load_blocks,
    load_numbers,
    outer_sum,
    route,
    route_backward,
    router_gradients,
    router_numbers,
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
from altup.kernels.operators import Gradients, operator

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


@operator("altup::gemma3n_predict")
def predict(
    state: Sequence[Tensor], weight: Tensor, norm: Tensor, eps: float, A: Tensor, active: int, stacked: bool
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """The predicted blocks, the router's numbers [..., K] before the tanh, and 1 / rms of block a: [...]."""
    blocks, K = blocks_of(state), len(weight)
    block = blocks[0]
    new = [block.new_empty(K, *block.shape)] if stacked else [block.new_empty(block.shape) for _ in range(K)]
    routed, inverses = router_numbers(block, K)
    yield new, routed, inverses
    xs, (weight, norm, A) = flat(blocks), flat((weight, norm, A))
    if inverses.numel():
        _forward_kernel[(inverses.numel(),)](
            tuple(blocks_of(new)), routed, inverses, xs, weight, norm, A, block.shape[-1], eps,
            ACTIVE=active, K=K, **tiles(FORWARD, xs[0]),
        )  # fmt: skip


@operator("altup::gemma3n_predict_backward")
def predict_backward(
    grads: Sequence[Tensor], state: Sequence[Tensor], weight: Tensor, norm: Tensor, A: Tensor, routed: Tensor,
    inverses: Tensor, active: int,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:  # fmt: skip
    """The gradients of the state (a list like it), of A·m: [..., K²], and of the router's numbers: [..., K]."""
    K = routed.shape[-1]
    d_state = [t.new_empty(t.shape) for t in state]
    dc, d_routed = routed.new_empty(*routed.shape[:-1], K * K), routed.new_empty(routed.shape)
    yield d_state, dc, d_routed
    upstream, xs, (weight, norm, A) = flat(blocks_of(grads)), flat(blocks_of(state)), flat((weight, norm, A))
    if inverses.numel():
        _backward_kernel[(inverses.numel(),)](
            tuple(blocks_of(d_state)), dc, d_routed, upstream, xs, weight, norm, A, routed, inverses,
            xs[0].shape[-1], ACTIVE=active, K=K, **tiles(BACKWARD, xs[0]),
        )  # fmt: skip


@predict.gradient
def _(
    d_new: list[Tensor], _routed: None, _inverses: None, *, state: list[Tensor], weight: Tensor, norm: Tensor,
    A: Tensor, active: int, routed: Tensor, inverses: Tensor, needs: set[str],
) -> Gradients:  # fmt: skip
    d_state, dc, d_routed = predict_backward(d_new, state, weight, norm, A, routed, inverses, active)
    dA = outer_sum(dc, torch.tanh(routed)).to(A.dtype) if "A" in needs else None
    x = blocks_of(state)[active]
    return {"state": d_state, "A": dA, **router_gradients(x, d_routed, inverses, weight, norm, needs)}
