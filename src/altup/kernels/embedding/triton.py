"""The kernels of an embedding table: rows looked up, and the table's gradient.

`in_order` are the ids sorted, `places` where they stood, and `starts[w]` is the first of word w among them. Most
words have few places: their programs hold whole rows. The places of one that has many are cut into parts, and its
row along d; a third kernel adds up what the parts are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW = 32  # the most places of a word that the first kernel takes
ROWS, WARPS = 4, 4  # rows that it reads at a time
MANY_ROWS, MANY_COLUMNS = 32, 128  # tile of the second
LOOKED_UP = 2048  # numbers of a program that looks rows up


def add_rows(table: Tensor, grad: Tensor, in_order: Tensor, places: Tensor, starts: Tensor) -> None:
    """Fill `table` [words, d] with the sums of `grad` [n, d]."""
    words, d = table.shape
    few_kernel[(words,)](
        table, grad, places, starts, D=d, BLOCK=triton.next_power_of_2(d), ROWS=ROWS, FEW=FEW, num_warps=WARPS
    )
    columns = triton.cdiv(d, MANY_COLUMNS)
    grid = triton.cdiv(len(places), FEW), columns
    tile = {"D": d, "ROWS": MANY_ROWS, "COLUMNS": MANY_COLUMNS, "FEW": FEW}
    parts = grad.new_empty(grid[0], d, dtype=torch.float32)
    part_kernel[grid](parts, grad, in_order, places, starts, **tile, num_warps=4)
    join_kernel[grid](table, parts, in_order, starts, **tile, num_warps=4)


def look_up(out: Tensor, ids: Tensor, table: Tensor) -> None:
    """out [n, d] ← the rows of `table` that `ids` [n] name, in out's dtype."""
    n, d = out.shape
    block = triton.next_power_of_2(d)
    rows = max(1, LOOKED_UP // block)
    look_up_kernel[(triton.cdiv(n, rows),)](
        out, ids, table, n, len(table), D=d, BLOCK=block, ROWS=rows, num_warps=4
    )


@triton.jit
def look_up_kernel(out, ids, table, n, words, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    word = tl.load(ids + place, mask=place < n, other=0).to(tl.int64)
    inside = (place < n)[:, None] & (column < D)[None, :]
    known = inside & ((word >= 0) & (word < words))[:, None]  # no such word: NaN, for all to see
    rows = tl.load(table + word[:, None] * D + column[None, :], mask=known, other=float("nan"))
    tl.store(out + place.to(tl.int64)[:, None] * D + column[None, :], rows.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of_places(grad, places, start, end, column, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ of the rows of `grad` at places[start:end], in some columns."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, end, ROWS):
        number = first + tl.arange(0, ROWS)
        row = tl.load(places + number, mask=number < end, other=0)
        inside = (number < end)[:, None] & (column < D)[None, :]
        acc += tl.load(grad + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit
def few_kernel(
    table, grad, places, starts, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr
):
    """The row of a word with up to FEW places; zero where it has none."""
    word = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + word)
    end = tl.load(starts + word + 1)
    if end - start <= FEW:
        column = tl.arange(0, BLOCK)
        total = _sum_of_places(grad, places, start, end, column, D, ROWS, BLOCK)
        tl.store(table + word * D + column, total.to(table.dtype.element_ty), mask=column < D)


@triton.jit
def _part(in_order, starts, FEW: tl.constexpr):
    """A sorted place that is a multiple of FEW, its word, and where that word's places begin and end.

    Every word with more than FEW places has such a place. From each of them on go its parts, the first also back
    to its start.
    """
    here = tl.program_id(0) * FEW
    word = tl.load(in_order + here).to(tl.int64)
    start = tl.load(starts + word)
    end = tl.load(starts + word + 1)
    return here, word, start, end


@triton.jit
def part_kernel(
    parts, grad, in_order, places, starts,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """parts[n]: the sum over the n-th part of a word that has many places."""
    here, _, start, end = _part(in_order, starts, FEW)
    if end - start > FEW:
        first = tl.where(here - start < FEW, start, here)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_of_places(grad, places, first, tl.minimum(here + FEW, end), column, D, ROWS, COLUMNS)
        tl.store(parts + tl.program_id(0).to(tl.int64) * D + column, total, mask=column < D)


@triton.jit
def join_kernel(
    table, parts, in_order, starts,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The row of a word that has many places, by the program of its first part."""
    here, word, start, end = _part(in_order, starts, FEW)
    if (end - start > FEW) & (here - start < FEW):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for n in range(tl.program_id(0), tl.cdiv(end, FEW), ROWS):
            row = n + tl.arange(0, ROWS)
            inside = (row * FEW < end)[:, None] & (column < D)[None, :]
            acc += tl.load(parts + row.to(tl.int64)[:, None] * D + column[None, :], mask=inside, other=0.0)
        tl.store(table + word * D + column, tl.sum(acc, 0).to(table.dtype.element_ty), mask=column < D)
