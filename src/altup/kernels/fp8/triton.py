"""Kernels that round to 8 bits: each writes a matrix and, for the product over its rows, its transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.fp8 import reference

EXPONENT = tl.constexpr(reference.EXPONENT)
SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
VALUE_MAX = tl.constexpr(torch.finfo(reference.VALUE).max)
# Rows and columns of a tile, and its warps; benchmarks/fp8.py times others.
CAST = (64, 64, 4)
GEGLU = (64, 64, 8)


@triton.jit
def power_of_two(largest, most: tl.constexpr):
    floor = (tl.div_rn(largest, most).to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return tl.maximum(2 * floor, SMALLEST_SCALE)


def largest(out: Tensor, x: Tensor) -> None:
    """Write the largest |x| of each of len(out) parts of a contiguous x; NaN where there is one."""
    programs, chunk = out.numel(), reference.CHUNK
    rounds = triton.cdiv(x.numel(), programs * chunk)
    largest_kernel[(programs,)](out, x, x.numel(), rounds, CHUNK=chunk, num_warps=8)


@triton.jit
def largest_kernel(out, x, numel, rounds, CHUNK: tl.constexpr):
    """Sizes are compared as integers, which order NaN above all numbers."""
    most = tl.zeros([CHUNK], tl.int32)
    for i in range(rounds):
        place = (tl.program_id(0) + i * tl.num_programs(0)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value).to(tl.int32, bitcast=True))
    tl.store(out + tl.program_id(0), tl.max(most, axis=0).to(tl.float32, bitcast=True))


def cast(q: Tensor, transposed: Tensor, scale: Tensor, x: Tensor, largest: Tensor) -> None:
    """scale ← that of the largest number, q ← x / scale, [m, n] with contiguous rows, transposed ← qᵀ, [n, m].

    q and transposed may be parts of larger matrices; len(largest) is a power of two.
    """
    rows, columns, warps = CAST
    m, n = x.shape
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    cast_kernel[grid](
        x, q, transposed, scale, largest, m, n, x.stride(0), q.stride(0), transposed.stride(0),
        MOST=torch.finfo(q.dtype).max, NUMBERS=largest.numel(), ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


@triton.jit
def cast_kernel(
    x, q, transposed, scale, largest, m, n, x_stride, q_stride, t_stride,
    MOST: tl.constexpr, NUMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < m)[:, None] & (column < n)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sizes = tl.load(largest + tl.arange(0, NUMBERS)).to(tl.int32, bitcast=True)
    own = power_of_two(tl.max(sizes, axis=0).to(tl.float32, bitcast=True), MOST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, own)
    low = (value * tl.div_rn(1.0, own)).to(q.dtype.element_ty)
    tl.store(q + row[:, None] * q_stride + column[None, :], low, mask=inside)
    tl.store(transposed + column[:, None] * t_stride + row[None, :], tl.trans(low), mask=tl.trans(inside))


def transpose(out: Tensor, q: Tensor) -> None:
    """out ← qᵀ of bytes, both contiguous."""
    rows, columns, warps = CAST
    m, n = q.shape
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    transpose_kernel[grid](out, q, m, n, ROWS=rows, COLUMNS=columns, num_warps=warps)


@triton.jit
def transpose_kernel(out, q, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < m)[:, None] & (column < n)[None, :]
    value = tl.load(q + row[:, None] * n + column[None, :], mask=inside)
    tl.store(out + column[:, None] * m + row[None, :], tl.trans(value), mask=tl.trans(inside))


@triton.jit
def gelu_parts(h0):
    """sigmoid(2u) with gelu(h) = h·sigmoid(2u), u = √(2/π)·(h + 0.044715·h³); and the derivative of 2u."""
    square = h0 * h0
    share = tl.sigmoid(1.5957691216057308 * h0 * (1 + 0.044715 * square))
    return share, 1.5957691216057308 * (1 + 3 * 0.044715 * square)


def geglu(q: Tensor, scale: Tensor, peaks: Tensor, h: Tensor) -> None:
    m, n = q.shape
    block = triton.next_power_of_2(n)
    warps = min(16, max(1, block // 512))
    geglu_kernel[(m,)](q, scale, peaks, h, n, BLOCK=block, num_warps=warps)


@triton.jit
def geglu_kernel(q, scale, peaks, h, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    h0 = tl.load(h + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    h1 = tl.load(h + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
    share, _ = gelu_parts(h0)
    gelu = h0 * share
    hidden = gelu * h1
    most = tl.max(tl.abs(hidden), axis=0)
    own = power_of_two(most, VALUE_MAX)
    tl.store(q + row * n + column, (hidden * tl.div_rn(1.0, own)).to(q.dtype.element_ty), mask=inside)
    tl.store(scale + row, own)
    tl.store(peaks + row * 3, tl.max(tl.abs(gelu), axis=0))
    tl.store(peaks + row * 3 + 1, tl.max(tl.abs(h1), axis=0))
    tl.store(peaks + row * 3 + 2, most)


def geglu_backward(
    q: Tensor,
    transposed: Tensor,
    hidden_transposed: Tensor,
    grad: Tensor,
    h: Tensor,
    hidden_scale: Tensor,
    grad_scale: Tensor,
) -> None:
    rows, columns, warps = GEGLU
    m, n = grad.shape
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    geglu_backward_kernel[grid](
        q, transposed, hidden_transposed, grad, h, hidden_scale, grad_scale, m, n,
        ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


@triton.jit
def geglu_backward_kernel(
    q, transposed, hidden_transposed, grad, h, hidden_scale, grad_scale, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < m)[:, None] & (column < n)[None, :]
    turned = tl.trans(inside)
    here = row[:, None] * (2 * n) + column[None, :]
    there = column[:, None] * m + row[None, :]
    h0 = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
    h1 = tl.load(h + here + n, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row[:, None] * n + column[None, :], mask=inside, other=0.0).to(tl.float32)
    share, slope = gelu_parts(h0)
    gelu = h0 * share
    by_hidden = tl.div_rn(1.0, tl.load(hidden_scale))
    by_grad = tl.div_rn(1.0, tl.load(grad_scale))
    hidden = (gelu * h1 * by_hidden).to(hidden_transposed.dtype.element_ty)
    tl.store(hidden_transposed + there, tl.trans(hidden), mask=turned)
    # Each is computed and rounded twice, in two orders, which a power of two does not change: where one rounded
    # value is stored in both layouts, ptxas 12.8 takes every fourth byte of the transpose from a register that
    # holds something else.
    slope = share + gelu * (1 - share) * slope
    d1, d0 = d * by_grad * gelu, d * by_grad * h1 * slope
    tl.store(q + here + n, d1.to(q.dtype.element_ty), mask=inside)
    tl.store(q + here, d0.to(q.dtype.element_ty), mask=inside)
    # h's gradients lie side by side in a row, and one below the other where it is transposed.
    n_rows = n.to(tl.int64) * m
    d1, d0 = d * (by_grad * gelu), d * (by_grad * h1) * slope
    tl.store(transposed + there + n_rows, tl.trans(d1.to(q.dtype.element_ty)), mask=turned)
    tl.store(transposed + there, tl.trans(d0.to(q.dtype.element_ty)), mask=turned)
