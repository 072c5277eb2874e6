"""Triton kernels of the correction's coefficients, and of the corrected active block that a branch starts from.

With δ = y − x̂ᵃ:

    forward     g = 1 + C·m(y),    z = (x̂ᵃ + gₐ δ) ∘ scale
    backward    dgₐ += ⟨dz, δ⟩,    dm = Cᵀ·dg,    dy = gₐ dz and what came through m,    dx̂ᵃ = (1 − gₐ) dz

with the upstream gradients dg and dz, here times scale. The scale's own is a sum over tokens, by another kernel.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
    COLUMNS,
    column_sums,
    columns_of,
    dot,
    load,
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
)
from altup.kernels.launch import Config, flat

# As for `altup_update_dynamic`, whose loops these are; not timed yet.
FORWARD = Config(warps=2, vectors=1)
BACKWARD = Config(warps=1, vectors=1)


@triton.jit
def _corrected(predicted, y, weight, start, lanes, mask):
    """x̂ᵃ + gₐ δ."""
    old = load(predicted, start, lanes, mask)
    return old + weight * (load(y, start, lanes, mask) - old)


@triton.jit
def _load_scaled(dz, scale, start, column, lanes, mask):
    grad = load(dz, start, lanes, mask)
    if scale is not None:
        grad *= load(scale, column, lanes, mask)
    return grad


@triton.jit
def _forward_kernel(
    g, z, routed, inverses, y, predicted, scale, weight, norm, C, d, eps,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    numbers = route(y, token, d, weight, norm, eps, K, BLOCK, WIDTH)
    store_numbers(routed, token * K, numbers, K)
    tl.store(inverses + token, numbers[K])
    c = times(C, tanh_of(numbers, K), K, K)
    for i in tl.static_range(K):
        tl.store(g + token * K + i, 1.0 + c[i])
    if predicted is not None:
        lanes = tile(BLOCK, WIDTH)
        for column in range(0, d, BLOCK):
            start = token * d + column
            mask = lanes < d - column
            new = _corrected(predicted, y, 1.0 + c[ACTIVE], start, lanes, mask)
            if scale is not None:
                new *= load(scale, column, lanes, mask)
            store(z, start, lanes, new, mask)


@triton.jit
def _backward_kernel(
    dy, d_predicted, d_g, d_routed, dg, dz, y, predicted, scale, weight, norm, C, g, routed, inverses, d,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    slopes = load_numbers(dg, token * K, K)
    numbers = load_numbers(routed, token * K, K)
    inverse = tl.load(inverses + token)
    weight_of_y = tl.load(g + token * K + ACTIVE)
    if predicted is not None:
        sums = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            start = token * d + column
            mask = lanes < d - column
            grad = _load_scaled(dz, scale, start, column, lanes, mask)
            sums += tl.sum(grad * (load(y, start, lanes, mask) - load(predicted, start, lanes, mask)), axis=1)
            store(d_predicted, start, lanes, (1.0 - weight_of_y) * grad, mask)
        of_active = tl.sum(sums)
        new = ()
        for i in tl.static_range(K):
            new = new + (slopes[i] + (of_active if i == ACTIVE else 0.0),)
        slopes = new
    store_numbers(d_g, token * K, slopes, K)
    d_numbers = slope_of_tanh(transposed_times(C, slopes, K, K), tanh_of(numbers, K), K)
    store_numbers(d_routed, token * K, d_numbers, K)
    along = dot(d_numbers, numbers, K)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        value = load(y, start, lanes, mask)
        total = route_backward(value, d_numbers, along, inverse, d, weight, norm, column, lanes, mask, K)
        if predicted is not None:
            total += weight_of_y * _load_scaled(dz, scale, start, column, lanes, mask)
        store(dy, start, lanes, total, mask)


@triton.jit
def _scale_sums_kernel(
    sums, dz, y, predicted, g, tokens, rows, d, ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Σ dz ∘ (x̂ᵃ + gₐ δ) over `rows` tokens from the program's first."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1).to(tl.int64)
    mask = columns < d
    total = tl.zeros([BLOCK], tl.float32)
    for token in range(chunk * rows, tl.minimum((chunk + 1) * rows, tokens)):
        weight = tl.load(g + token * K + ACTIVE)
        new = _corrected(predicted, y, weight, token * d, columns, mask)
        total += load(dz, token * d, columns, mask) * new
    tl.store(sums + chunk * d + columns, total, mask=mask)


def forward(
    g: Tensor,
    z: Tensor | None,
    routed: Tensor,
    inverses: Tensor,
    y: Tensor,
    predicted: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    norm: Tensor,
    C: Tensor,
    active: int,
    eps: float,
) -> None:
    """Fill g: [..., K], z: [..., d], the router's numbers [..., K] and 1 / rms(y): [...], all contiguous."""
    y, predicted, scale, weight, norm, C = flat((y, predicted, scale, weight, norm, C))
    if inverses.numel():
        _forward_kernel[(inverses.numel(),)](
            g, z, routed, inverses, y, predicted, scale, weight, norm, C, y.shape[-1], eps,
            ACTIVE=active, K=len(C), **tiles(FORWARD, y, predicted),
        )  # fmt: skip


def backward(
    dy: Tensor,
    d_predicted: Tensor | None,
    d_g: Tensor,
    d_routed: Tensor,
    dg: Tensor,
    dz: Tensor | None,
    y: Tensor,
    predicted: Tensor | None,
    scale: Tensor | None,
    weight: Tensor,
    norm: Tensor,
    C: Tensor,
    g: Tensor,
    routed: Tensor,
    inverses: Tensor,
    active: int,
) -> None:
    """Fill the gradients of y, x̂ᵃ, of g with what came through z, and of the router's numbers."""
    dg, dz, y, predicted, scale, weight, norm, C = flat((dg, dz, y, predicted, scale, weight, norm, C))
    if inverses.numel():
        _backward_kernel[(inverses.numel(),)](
            dy, d_predicted, d_g, d_routed, dg, dz, y, predicted, scale, weight, norm, C, g, routed, inverses,
            y.shape[-1], ACTIVE=active, K=len(C), **tiles(BACKWARD, y, predicted),
        )  # fmt: skip


def scale_sums(dz: Tensor, y: Tensor, predicted: Tensor, g: Tensor, active: int) -> Tensor:
    """The gradient of the scale: [d], float32."""
    dz, y, predicted, g = flat((dz, y, predicted, g))
    sums, rows, launch = column_sums(y)
    if launch:
        _scale_sums_kernel[launch](
            sums, dz, y, predicted, g, y.numel() // y.shape[-1], rows, y.shape[-1],
            ACTIVE=active, K=g.shape[-1], BLOCK=columns_of(y), num_warps=COLUMNS.warps,
        )  # fmt: skip
    return sums.sum(dim=0)
