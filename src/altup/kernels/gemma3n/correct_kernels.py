"""Triton kernels of the correction: its coefficients with the active block, and then all blocks with the branch.

With δ = y − x̂ᵃ, the branch p, 1/r = 1 / rms(p) and the norm's scale w:

    coefficients    g = 1 + C·m(y),    z = (x̂ᵃ + gₐ δ) ∘ scale
    blocks          x_newⁱ = x̂ⁱ + gᵢ δ, and for i ≥ 1 also w ∘ p / r

and backward, with the upstream gradients dz (times scale), dg and G, and q = Σ_{i ≥ 1} Gⁱ:

    coefficients    dgₐ += ⟨dz, δ⟩,    dm = Cᵀ·dg,    dy = gₐ dz and what came through m,    dx̂ᵃ = (1 − gₐ) dz
    blocks          dgᵢ = ⟨Gⁱ, δ⟩,    dy = Σ gᵢ Gⁱ,    dx̂ᵃ = Gᵃ − dy,    dp = (w ∘ q − p ⟨w ∘ q, p⟩ / (r² d)) / r

The other predicted blocks' gradients are G itself. Scale and w get sums over tokens, by kernels of their own.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
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
    times,
    transposed_times,
    zeros,
)
from altup.kernels.launch import Config, flat, multiprocessors, vector_width

# As for `altup_update_dynamic`, whose loops these are; not timed yet.
FORWARD = Config(warps=2, vectors=1)
BACKWARD = Config(warps=1, vectors=1)
COLUMNS = Config(warps=1, vectors=1, programs_per_sm=8)


@triton.jit
def _coefficients_kernel(
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
            old = load(predicted, start, lanes, mask)
            new = old + (1.0 + c[ACTIVE]) * (load(y, start, lanes, mask) - old)
            if scale is not None:
                new *= load(scale, column, lanes, mask)
            store(z, start, lanes, new, mask)


@triton.jit
def _coefficients_backward_kernel(
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
            grad = load(dz, start, lanes, mask)
            if scale is not None:
                grad *= load(scale, column, lanes, mask)
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
            grad = load(dz, start, lanes, mask)
            if scale is not None:
                grad *= load(scale, column, lanes, mask)
            total += weight_of_y * grad
        store(dy, start, lanes, total, mask)


@triton.jit
def _blocks_kernel(
    outs, inverses, predicted, y, g, branch, norm, d, eps,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    weights = load_numbers(g, token * K, K)
    if branch is not None:
        squares = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            value = load(branch, token * d + column, lanes, lanes < d - column)
            squares += tl.sum(value * value, axis=1)
        inverse = 1.0 / tl.sqrt(tl.sum(squares) / d + eps)
        tl.store(inverses + token, inverse)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        active = load(predicted[ACTIVE], start, lanes, mask)
        innovation = load(y, start, lanes, mask) - active
        if branch is not None:
            added = load(branch, start, lanes, mask) * inverse * load(norm, column, lanes, mask)
        for i in tl.static_range(K):
            if i == ACTIVE:
                new = active + weights[i] * innovation
            else:
                new = load(predicted[i], start, lanes, mask) + weights[i] * innovation
            if i > 0 and branch is not None:
                new += added
            store(outs[i], start, lanes, new, mask)


@triton.jit
def _blocks_backward_kernel(
    dy, d_predicted, dg, d_branch, grads, predicted, y, g, branch, norm, inverses, d,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    weights = load_numbers(g, token * K, K)
    sums = zeros(K, BLOCK // WIDTH)
    along = tl.zeros([BLOCK // WIDTH], tl.float32)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        innovation = load(y, start, lanes, mask) - load(predicted, start, lanes, mask)
        grad = ()
        for i in tl.static_range(K):
            grad = grad + (load(grads[i], start, lanes, mask),)
        total = weights[0] * grad[0]
        for i in tl.static_range(1, K):
            total += weights[i] * grad[i]
        store(dy, start, lanes, total, mask)
        store(d_predicted, start, lanes, grad[ACTIVE] - total, mask)
        new = ()
        for i in tl.static_range(K):
            new = new + (sums[i] + tl.sum(grad[i] * innovation, axis=1),)
        sums = new
        if branch is not None:
            added = grad[1]
            for i in tl.static_range(2, K):
                added += grad[i]
            scaled = added * load(norm, column, lanes, mask)
            along += tl.sum(scaled * load(branch, start, lanes, mask), axis=1)
    for i in tl.static_range(K):
        tl.store(dg + token * K + i, tl.sum(sums[i]))
    if branch is not None:
        inverse = tl.load(inverses + token)
        share = tl.sum(along) * inverse * inverse / d
        for column in range(0, d, BLOCK):  # once more, out of the cache: the norm waited for its sum
            start = token * d + column
            mask = lanes < d - column
            added = load(grads[1], start, lanes, mask)
            for i in tl.static_range(2, K):
                added += load(grads[i], start, lanes, mask)
            value = load(branch, start, lanes, mask)
            dp = inverse * (added * load(norm, column, lanes, mask) - share * value)
            store(d_branch, start, lanes, dp, mask)


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
        old = load(predicted, token * d, columns, mask)
        new = old + tl.load(g + token * K + ACTIVE) * (load(y, token * d, columns, mask) - old)
        total += load(dz, token * d, columns, mask) * new
    tl.store(sums + chunk * d + columns, total, mask=mask)


@triton.jit
def _norm_sums_kernel(sums, grads, branch, inverses, tokens, rows, d, K: tl.constexpr, BLOCK: tl.constexpr):
    """Σ q ∘ p / r over `rows` tokens from the program's first."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1).to(tl.int64)
    mask = columns < d
    total = tl.zeros([BLOCK], tl.float32)
    for token in range(chunk * rows, tl.minimum((chunk + 1) * rows, tokens)):
        added = load(grads[1], token * d, columns, mask)
        for i in tl.static_range(2, K):
            added += load(grads[i], token * d, columns, mask)
        total += added * load(branch, token * d, columns, mask) * tl.load(inverses + token)
    tl.store(sums + chunk * d + columns, total, mask=mask)


def coefficients(
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
        with torch.cuda.device_of(y):
            _coefficients_kernel[(inverses.numel(),)](
                g, z, routed, inverses, y, predicted, scale, weight, norm, C, y.shape[-1], eps,
                ACTIVE=active, K=len(C), **_tiles(FORWARD, y, predicted),
            )  # fmt: skip


def coefficients_backward(
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
        with torch.cuda.device_of(y):
            _coefficients_backward_kernel[(inverses.numel(),)](
                dy, d_predicted, d_g, d_routed, dg, dz, y, predicted, scale, weight, norm, C, g, routed, inverses,
                y.shape[-1], ACTIVE=active, K=len(C), **_tiles(BACKWARD, y, predicted),
            )  # fmt: skip


def blocks(
    outs: Sequence[Tensor],
    inverses: Tensor,
    predicted: Sequence[Tensor],
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    active: int,
    eps: float,
) -> None:
    """Fill the new blocks and, where there is a branch, 1 / rms(branch): [...], all contiguous."""
    predicted, (y, g, branch, norm) = flat(predicted), flat((y, g, branch, norm))
    tokens = y.numel() // y.shape[-1]
    if tokens:
        with torch.cuda.device_of(y):
            _blocks_kernel[(tokens,)](
                tuple(outs), inverses, predicted, y, g, branch, norm, y.shape[-1], eps,
                ACTIVE=active, K=len(predicted), **_tiles(FORWARD, y, predicted[0], branch),
            )  # fmt: skip


def blocks_backward(
    dy: Tensor,
    d_predicted: Tensor,
    dg: Tensor,
    d_branch: Tensor | None,
    grads: Sequence[Tensor],
    predicted: Tensor,
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    inverses: Tensor,
    active: int,
) -> None:
    """Fill the gradients of y, x̂ᵃ (`predicted`), g and branch."""
    grads, (predicted, y, g, branch, norm) = flat(grads), flat((predicted, y, g, branch, norm))
    tokens = y.numel() // y.shape[-1]
    if tokens:
        with torch.cuda.device_of(y):
            _blocks_backward_kernel[(tokens,)](
                dy, d_predicted, dg, d_branch, grads, predicted, y, g, branch, norm, inverses, y.shape[-1],
                ACTIVE=active, K=len(grads), **_tiles(BACKWARD, y, predicted, branch),
            )  # fmt: skip


def scale_sums(dz: Tensor, y: Tensor, predicted: Tensor, g: Tensor, active: int) -> Tensor:
    """The gradient of the scale: [d], float32."""
    dz, y, predicted, g = flat((dz, y, predicted, g))
    sums, rows, launch = _column_sums(y)
    if launch:
        with torch.cuda.device_of(y):
            _scale_sums_kernel[launch](
                sums, dz, y, predicted, g, y.numel() // y.shape[-1], rows, y.shape[-1],
                ACTIVE=active, K=g.shape[-1], BLOCK=_columns(y), num_warps=COLUMNS.warps,
            )  # fmt: skip
    return sums.sum(dim=0)


def norm_sums(grads: Sequence[Tensor], branch: Tensor, inverses: Tensor) -> Tensor:
    """The gradient of the norm's scale: [d], float32."""
    grads, (branch, inverses) = flat(grads), flat((branch, inverses))
    sums, rows, launch = _column_sums(branch)
    if launch:
        with torch.cuda.device_of(branch):
            _norm_sums_kernel[launch](
                sums, grads, branch, inverses, branch.numel() // branch.shape[-1], rows, branch.shape[-1],
                K=len(grads), BLOCK=_columns(branch), num_warps=COLUMNS.warps,
            )  # fmt: skip
    return sums.sum(dim=0)


def _tiles(config: Config, *tensors: Tensor | None) -> dict[str, int]:
    width = vector_width(*tensors)
    return {"BLOCK": width * 32 * config.warps * config.vectors, "WIDTH": width, "num_warps": config.warps}


def _columns(x: Tensor) -> int:
    return vector_width(x) * 32 * COLUMNS.warps * COLUMNS.vectors


def _column_sums(x: Tensor) -> tuple[Tensor, int, tuple[int, int] | None]:
    """Room for the sums of each chunk of tokens, the tokens of a chunk, and the grid."""
    d = x.shape[-1]
    tokens, across = x.numel() // d, triton.cdiv(d, _columns(x))
    if not tokens:
        return x.new_zeros(1, d, dtype=torch.float32), 0, None
    rows = triton.cdiv(tokens * across, multiprocessors(x.device) * COLUMNS.programs_per_sm)
    chunks = triton.cdiv(tokens, rows)
    return x.new_empty(chunks, d, dtype=torch.float32), rows, (across, chunks)
