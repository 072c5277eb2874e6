"""Kernels that round to 8 bits: each writes a matrix and, for the product over its rows, its transpose.

A program reads its tile as four, of every fourth row each. So a thread holds four numbers of a column, one below
the other, and writes them into the transpose as one word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.fp8 import reference
from altup.kernels.launch import interprets_triton

EXPONENT = tl.constexpr(reference.EXPONENT)
SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)
VALUE_MAX = tl.constexpr(torch.finfo(reference.VALUE).max)
GRADIENT_MAX = tl.constexpr(torch.finfo(reference.GRADIENT).max)
GELU_SLOPE, SLACK = tl.constexpr(reference.GELU_SLOPE), tl.constexpr(reference.SLACK)
# The GPU's own instructions, which the interpreter does not know: it computes the same in other words.
NATIVE = tl.constexpr(not interprets_triton())
# Rows and columns of a tile, and its warps; benchmarks/fp8.py of commit 575338fc timed others.
CAST = (128, 64, 8)
TRANSPOSE = (64, 64, 4)
GEGLU = (128, 64, 8)
PEAK_CHUNK, PEAK_PROGRAMS = 1024, 32
ROW = 512  # numbers of a row that a warp holds


@triton.jit
def power_of_two(largest, most: tl.constexpr):
    floor = (tl.div_rn(largest, most).to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return tl.maximum(2 * floor, SMALLEST_SCALE)


@triton.jit
def four_bytes(a, b, c, d, dtype: tl.constexpr):
    """Four numbers rounded to 8 bits, as the bytes of a word, `a` the lowest.

    Not by the bytes of what `to` rounds: of a value that is stored in both layouts ptxas 12.8 takes every fourth
    byte from a register that holds something else.
    """
    if NATIVE:
        PAIRS: tl.constexpr = "e5m2x2" if dtype == tl.float8e5 else "e4m3x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite." + PAIRS + ".f32 low, $2, $1; "
            "cvt.rn.satfinite." + PAIRS + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _byte(a, dtype) | _byte(b, dtype) << 8 | _byte(c, dtype) << 16 | _byte(d, dtype) << 24


@triton.jit
def _byte(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)


def largest(out: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Write the largest numbers of parts that are alike and contiguous, [parts, len(out) / parts]; NaN where there
    is one. They are rounded to `dtype` first."""
    programs, chunk, numel = out.numel() // len(parts), reference.CHUNK, parts[0].numel()
    rounds = triton.cdiv(numel, programs * chunk)
    largest_kernel[(programs, len(parts))](
        out, tuple(parts), numel, rounds, HALF=rounds_first(parts, dtype), CHUNK=chunk, num_warps=8
    )


@triton.jit
def _pick(parts, part):
    """parts[part]; all are aligned as PyTorch's allocator does."""
    x = parts[0]
    for i in tl.static_range(1, len(parts)):
        if part == i:
            x = parts[i]
    return tl.multiple_of(x, 16)


@triton.jit
def largest_kernel(out, parts, numel, rounds, HALF: tl.constexpr, CHUNK: tl.constexpr):
    most = largest_of(_pick(parts, tl.program_id(1)), numel, rounds, HALF, CHUNK)
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), most)


@triton.jit
def largest_of(x, numel, rounds, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """The largest number of a program's chunks. Sizes are compared as integers, which order NaN above all
    numbers."""
    most = tl.zeros([CHUNK], tl.int32)
    for i in range(rounds):
        offset = (tl.program_id(0) + i * tl.num_programs(0)).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + offset, mask=offset < numel, other=0.0)
        if HALF:
            value = value.to(tl.bfloat16)
        most = tl.maximum(most, tl.abs(value.to(tl.float32)).to(tl.int32, bitcast=True))
    return tl.max(most, axis=0).to(tl.float32, bitcast=True)


def cast(
    q: Tensor, transposed: Tensor, scale: Tensor, parts: Sequence[Tensor], largest: Tensor, dtype: torch.dtype,
    below: bool = False,
) -> None:  # fmt: skip
    """scale ← that of the largest number, q ← parts / scale, side by side, [m, n], transposed ← qᵀ, [n, m].

    parts: [m, nᵢ] with contiguous rows or, with `below`, [mᵢ, n] that go one below the other; numbers of rows are
    multiples of 4. They are rounded to `dtype` first. Parts that are alike take one launch.
    """
    begin, dim = 0, 0 if below else 1
    while parts:
        like = parts[0].shape, parts[0].stride()
        count = next((i for i, part in enumerate(parts) if (part.shape, part.stride()) != like), len(parts))
        size = count * parts[0].shape[dim]
        _cast_alike(
            q.narrow(dim, begin, size), transposed.narrow(1 - dim, begin, size), scale, parts[:count], largest,
            dtype, below,
        )  # fmt: skip
        begin, parts = begin + size, parts[count:]


def _cast_alike(
    q: Tensor, transposed: Tensor, scale: Tensor, parts: Sequence[Tensor], largest: Tensor, dtype: torch.dtype,
    below: bool,
) -> None:  # fmt: skip
    rows, columns, warps = CAST
    m, n = parts[0].shape
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows), len(parts))
    cast_kernel[grid](
        tuple(parts), q, transposed.view(torch.int32), scale, largest, largest.numel(), m, n,
        parts[0].stride(0), q.stride(0), transposed.stride(0) // 4, MOST=torch.finfo(q.dtype).max,
        NUMBERS=triton.next_power_of_2(largest.numel()), BELOW=below, HALF=rounds_first(parts, dtype),
        ROWS=rows, COLUMNS=columns, EVEN=m % rows == 0 and n % columns == 0, num_warps=warps,
    )  # fmt: skip


def rounds_first(parts: Sequence[Tensor], dtype: torch.dtype) -> bool:
    return parts[0].dtype == torch.float32 and dtype == torch.bfloat16


@triton.jit
def _load(x, row, column, stride, inside, EVEN: tl.constexpr):
    """A tile; EVEN: all of it is inside."""
    at = x + row[:, None] * stride + column[None, :]
    if EVEN:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, column, stride, value, inside, EVEN: tl.constexpr):
    at = x + row[:, None] * stride + column[None, :]
    if EVEN:
        tl.store(at, value.to(x.dtype.element_ty))
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def cast_kernel(
    parts, q, words, scale, largest, numbers, m, n, x_stride, q_stride, words_stride,
    MOST: tl.constexpr, NUMBERS: tl.constexpr, BELOW: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """words: the transpose, four rows of q in each."""
    part = tl.program_id(2)
    x = _pick(parts, part)
    word = tl.program_id(1).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (4 * word < m)[:, None] & (column < n)[None, :]
    a, b, c, d = tile_of(x, word, column, x_stride, inside, HALF, EVEN)
    i = tl.arange(0, NUMBERS)
    sizes = tl.load(largest + i, mask=i < numbers, other=0.0).to(tl.int32, bitcast=True)
    own = power_of_two(tl.max(sizes, axis=0).to(tl.float32, bitcast=True), MOST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (part == 0):
        tl.store(scale, own)
    by = tl.div_rn(1.0, own)
    part = part.to(tl.int64)
    if BELOW:
        q += part * m * q_stride
        words += part * (m // 4)
    else:
        q += part * n
        words += part * n * words_stride
    store_both(q, words, a * by, b * by, c * by, d * by, word, column, q_stride, words_stride, inside, EVEN)


@triton.jit
def tile_of(x, word, column, stride, inside, HALF: tl.constexpr, EVEN: tl.constexpr):
    """A tile as four, of every fourth row each. All loads come before any store, behind which none could be moved:
    it might be to the same place."""
    a = _load(x, 4 * word, column, stride, inside, EVEN)
    b = _load(x, 4 * word + 1, column, stride, inside, EVEN)
    c = _load(x, 4 * word + 2, column, stride, inside, EVEN)
    d = _load(x, 4 * word + 3, column, stride, inside, EVEN)
    if HALF:
        a, b = a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)
        c, d = c.to(tl.bfloat16).to(tl.float32), d.to(tl.bfloat16).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_both(q, words, a, b, c, d, word, column, q_stride, words_stride, inside, EVEN: tl.constexpr):
    """A tile, as `tile_of` reads it, in both layouts; words: the transpose, four rows in each."""
    _store(q, 4 * word, column, q_stride, a, inside, EVEN)
    _store(q, 4 * word + 1, column, q_stride, b, inside, EVEN)
    _store(q, 4 * word + 2, column, q_stride, c, inside, EVEN)
    _store(q, 4 * word + 3, column, q_stride, d, inside, EVEN)
    turned = tl.trans(four_bytes(a, b, c, d, q.dtype.element_ty))
    _store(words, column, word, words_stride, turned, tl.trans(inside), EVEN)


def transpose(out: Tensor, q: Tensor) -> None:
    """out ← qᵀ of bytes, both contiguous."""
    rows, columns, warps = TRANSPOSE
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
    # 2u·log₂e, and what follows, in instructions that are off by a few units of float32's last place.
    exponent = h0 * (-2.302208198144325 - 0.1029432395800235 * square)
    if NATIVE:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
        share = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        share = 1 / (1 + tl.exp2(exponent))
    return share, 1.5957691216057308 + 0.21406444881780076 * square


def geglu(q: Tensor, scale: Tensor, peaks: Tensor, h: Tensor) -> None:
    m, n = q.shape
    block = triton.next_power_of_2(n)
    warps = min(16, max(1, block // ROW))
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


def geglu_scales(hidden_scale: Tensor, grad_scale: Tensor, rows: Tensor, columns: Tensor, peaks: Tensor) -> None:
    """Many programs find the largest of their parts first: one alone would wait for memory each time."""
    m, n = rows.numel(), columns.numel()
    programs = min(PEAK_PROGRAMS, triton.cdiv(max(m, n), PEAK_CHUNK))
    found = rows.new_empty(5, programs)
    geglu_peaks_kernel[(programs,)](found, rows, columns, peaks, m, n, CHUNK=PEAK_CHUNK, num_warps=4)
    geglu_scales_kernel[(1,)](hidden_scale, grad_scale, found, programs, BLOCK=PEAK_PROGRAMS, num_warps=1)


@triton.jit
def _peak(x, numel, step, CHUNK: tl.constexpr):
    """The largest of a program's chunks of x[0], x[step], …, none of which is negative, as the bits of a float32;
    NaN where there is one."""
    most = tl.zeros([CHUNK], tl.int32)
    for start in range(tl.program_id(0) * CHUNK, numel, tl.num_programs(0) * CHUNK):
        i = start + tl.arange(0, CHUNK)
        most = tl.maximum(most, tl.load(x + i * step, mask=i < numel, other=0.0).to(tl.int32, bitcast=True))
    return tl.max(most, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def geglu_peaks_kernel(found, rows, columns, peaks, m, n, CHUNK: tl.constexpr):
    to = found + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(to, _peak(peaks, m, 3, CHUNK))
    tl.store(to + step, _peak(peaks + 1, m, 3, CHUNK))
    tl.store(to + 2 * step, _peak(peaks + 2, m, 3, CHUNK))
    tl.store(to + 3 * step, _peak(rows, m, 1, CHUNK))
    tl.store(to + 4 * step, _peak(columns, n, 1, CHUNK))


@triton.jit
def geglu_scales_kernel(hidden_scale, grad_scale, found, programs, BLOCK: tl.constexpr):
    gelu, h1 = _peak(found, programs, 1, BLOCK), _peak(found + programs, programs, 1, BLOCK)
    hidden = _peak(found + 2 * programs, programs, 1, BLOCK)
    tl.store(hidden_scale, power_of_two(hidden, VALUE_MAX))
    row, column = _peak(found + 3 * programs, programs, 1, BLOCK), _peak(found + 4 * programs, programs, 1, BLOCK)
    bound = SLACK * row * column
    bound *= tl.where(gelu < GELU_SLOPE * h1, GELU_SLOPE * h1, gelu)
    tl.store(grad_scale, power_of_two(bound, GRADIENT_MAX))


def geglu_backward(
    q: Tensor,
    transposed: Tensor,
    hidden_transposed: Tensor,
    grad: Tensor,
    h: Tensor,
    hidden_scale: Tensor,
    grad_scale: Tensor,
) -> None:
    """As `geglu_backward_reference`; the number of rows is a multiple of 4."""
    rows, columns, warps = GEGLU
    m, n = grad.shape
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    geglu_backward_kernel[grid](
        q, transposed.view(torch.int32), hidden_transposed.view(torch.int32), grad, h, hidden_scale, grad_scale,
        m, n, ROWS=rows, COLUMNS=columns, EVEN=m % rows == 0 and n % columns == 0, num_warps=warps,
    )  # fmt: skip


@triton.jit
def _load_row(grad, h, row, column, n, inside, EVEN: tl.constexpr):
    h0 = _load(h, row, column, 2 * n, inside, EVEN)
    h1 = _load(h + n, row, column, 2 * n, inside, EVEN)
    return h0, h1, _load(grad, row, column, n, inside, EVEN)


@triton.jit
def _geglu_row(q, loaded, row, column, n, by_hidden, by_grad, inside, EVEN: tl.constexpr):
    """Of a quarter of a tile: hidden and the gradients of h₀ and h₁; these are rounded and stored, too."""
    h0, h1, d = loaded
    d *= by_grad
    share, slope = gelu_parts(h0)
    gelu = h0 * share
    rest = gelu * slope
    d0, d1 = d * h1 * (share + (rest - rest * share)), d * gelu
    _store(q, row, column, 2 * n, d0, inside, EVEN)
    _store(q + n, row, column, 2 * n, d1, inside, EVEN)
    return gelu * (h1 * by_hidden), d0, d1


@triton.jit
def geglu_backward_kernel(
    q, words, hidden_words, grad, h, hidden_scale, grad_scale, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """words: the transposes, four rows in each. h's gradients lie side by side in a row, and one below the other
    where they are transposed."""
    word = tl.program_id(1).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (4 * word < m)[:, None] & (column < n)[None, :]
    # All loads come first: none can be moved before a store, which might be to the same place.
    a = _load_row(grad, h, 4 * word, column, n, inside, EVEN)
    b = _load_row(grad, h, 4 * word + 1, column, n, inside, EVEN)
    c = _load_row(grad, h, 4 * word + 2, column, n, inside, EVEN)
    d = _load_row(grad, h, 4 * word + 3, column, n, inside, EVEN)
    by_hidden = tl.div_rn(1.0, tl.load(hidden_scale))
    by_grad = tl.div_rn(1.0, tl.load(grad_scale))
    a, a0, a1 = _geglu_row(q, a, 4 * word, column, n, by_hidden, by_grad, inside, EVEN)
    b, b0, b1 = _geglu_row(q, b, 4 * word + 1, column, n, by_hidden, by_grad, inside, EVEN)
    c, c0, c1 = _geglu_row(q, c, 4 * word + 2, column, n, by_hidden, by_grad, inside, EVEN)
    d, d0, d1 = _geglu_row(q, d, 4 * word + 3, column, n, by_hidden, by_grad, inside, EVEN)
    hidden = tl.trans(four_bytes(a, b, c, d, tl.float8e4nv))
    first = tl.trans(four_bytes(a0, b0, c0, d0, q.dtype.element_ty))
    second = tl.trans(four_bytes(a1, b1, c1, d1, q.dtype.element_ty))
    turned = tl.trans(inside)
    _store(hidden_words, column, word, m // 4, hidden, turned, EVEN)
    _store(words, column, word, m // 4, first, turned, EVEN)
    _store(words, n + column, word, m // 4, second, turned, EVEN)
