"""The kernels of an embedding table: rows looked up, and the table's gradient.

`in_order` are the ids sorted, `positions` where they stood, and `starts[w]` is the first of word w among them.
Most words have few positions: their programs hold whole rows. The positions of one that has many are cut into
parts, and its row along d; a third kernel adds up what the parts are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import ceil_div, power_of_two
from altup.kernels.operators import Gradients, operator

FEW = 32  # the most positions of a word that the first kernel takes
ROWS, WARPS = 4, 4  # rows that it reads at a time
MANY_ROWS, MANY_COLUMNS = 32, 128  # tile of the second
LOOKED_UP = 2048  # numbers of a program that looks rows up


@operator("altup::embedding")
def look_up(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """ids: [...], contiguous, table: [words, d] → [..., d] in `dtype`; NaN where there is no such word."""
    words, d = table.shape
    out = table.new_empty(*ids.shape, d, dtype=dtype)
    yield out
    n, block = ids.numel(), power_of_two(d)
    rows = max(1, LOOKED_UP // block)
    look_up_kernel[(ceil_div(n, rows),)](
        out, ids, table.contiguous(), n, words, D=d, BLOCK=block, ROWS=rows, num_warps=4
    )


@operator("altup::embedding_backward")
def look_up_backward(grad: Tensor, ids: Tensor, words: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The table's gradient [words, d] in `dtype`: the rows of `grad` [..., d] added up by word.

    Sorted by word, the positions of a word stand side by side, in their order: the sums never vary. A GPU sorts by
    8 bits at a time, so ids are as short as they can be.
    """
    d = grad.shape[-1]
    table = grad.new_empty(words, d, dtype=dtype)
    yield table
    grad = grad.contiguous()
    short = torch.int16 if words < 2**15 else torch.int32
    in_order, positions = torch.sort(ids.flatten().to(short), stable=True)
    starts = torch.searchsorted(in_order, torch.arange(words + 1, device=ids.device, dtype=short), out_int32=True)
    few_kernel[(words,)](
        table, grad, positions, starts, D=d, BLOCK=power_of_two(d), ROWS=ROWS, FEW=FEW, num_warps=WARPS
    )
    grid = ceil_div(len(positions), FEW), ceil_div(d, MANY_COLUMNS)
    tile = {"D": d, "ROWS": MANY_ROWS, "COLUMNS": MANY_COLUMNS, "FEW": FEW}
    parts = grad.new_empty(grid[0], d, dtype=torch.float32)
    part_kernel[grid](parts, grad, in_order, positions, starts, **tile, num_warps=4)
    join_kernel[grid](table, parts, in_order, starts, **tile, num_warps=4)


@look_up.gradient
def _(d_out: Tensor, *, ids: Tensor, table: Tensor) -> Gradients:
    return {"table": look_up_backward(d_out, ids, len(table), table.dtype)}


@triton.jit
def look_up_kernel(out, ids, table, n, words, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    offset = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    word = tl.load(ids + offset, mask=offset < n, other=0).to(tl.int64)
    inside = (offset < n)[:, None] & (column < D)[None, :]
    known = inside & ((word >= 0) & (word < words))[:, None]  # no such word: NaN, for all to see
    rows = tl.load(table + word[:, None] * D + column[None, :], mask=known, other=float("nan"))
    tl.store(out + offset.to(tl.int64)[:, None] * D + column[None, :], rows.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of_positions(
    grad, positions, start, end, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Σ of the rows of `grad` at positions[start:end], in some columns."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, ROWS):
        number = first + tl.arange(0, ROWS)
        row = tl.load(positions + number, mask=number < end, other=0)
        inside = (number < end)[:, None] & (column < D)[None, :]
        acc += tl.load(grad + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit
def few_kernel(
    table, grad, positions, starts, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr
):
    """The row of a word with up to FEW positions; zero where it has none."""
    word = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + word)
    end = tl.load(starts + word + 1)
    if end - start <= FEW:
        column = tl.arange(0, BLOCK)
        total = _sum_of_positions(grad, positions, start, end, column, D, ROWS, BLOCK)
        tl.store(table + word * D + column, total.to(table.dtype.element_ty), mask=column < D)


@triton.jit
def _part(in_order, starts, FEW: tl.constexpr):
    """A sorted position that is a multiple of FEW, its word, and where that word's positions begin and end.

    Every word with more than FEW positions has one. From each of them on go its parts, the first also back to its
    start.
    """
    here = tl.program_id(0) * FEW
    word = tl.load(in_order + here).to(tl.int64)
    start = tl.load(starts + word)
    end = tl.load(starts + word + 1)
    return here, word, start, end


@triton.jit
def part_kernel(
    parts, grad, in_order, positions, starts,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """parts[n]: the sum over the n-th part of a word that has many positions."""
    here, _, start, end = _part(in_order, starts, FEW)
    if end - start > FEW:
        first = tl.where(here - start < FEW, start, here)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_of_positions(grad, positions, first, tl.minimum(here + FEW, end), column, D, ROWS, COLUMNS)
        tl.store(parts + tl.program_id(0).to(tl.int64) * D + column, total, mask=column < D)


@triton.jit
def join_kernel(
    table, parts, in_order, starts,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The row of a word that has many positions, by the program of its first part."""
    here, word, start, end = _part(in_order, starts, FEW)
    if (end - start > FEW) & (here - start < FEW):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for n in range(tl.program_id(0), tl.cdiv(end, FEW), ROWS):
            row = n + tl.arange(0, ROWS)
            inside = (row * FEW < end)[:, None] & (column < D)[None, :]
            acc += tl.load(parts + row.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0)
        tl.store(table + word * D + column, tl.sum(acc, 0).to(table.dtype.element_ty), mask=column < D)
