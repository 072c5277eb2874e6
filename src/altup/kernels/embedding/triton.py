"""The kernels of an embedding table's gradient: a program writes the row of one word.

`in_order` are the ids sorted, `places` where they stood, and `starts[w]` is the first of word w among them. Most
words have few places: their programs hold whole rows. One that has many would keep a program busy when all others
are done, so a second kernel cuts its row along d.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FEW = 32  # the most places of a word that the first kernel takes
ROWS, WARPS = 4, 4  # rows that it reads at a time
MANY_ROWS, MANY_COLUMNS = 32, 128  # tile of the second


def add_rows(table: Tensor, grad: Tensor, in_order: Tensor, places: Tensor, starts: Tensor) -> None:
    """Fill `table` [words, d] with the sums of `grad` [n, d]."""
    words, d = table.shape
    few_kernel[(words,)](
        table, grad, places, starts, D=d, BLOCK=triton.next_power_of_2(d), ROWS=ROWS, FEW=FEW, num_warps=WARPS
    )
    parts = triton.cdiv(d, MANY_COLUMNS)
    many_kernel[(triton.cdiv(len(places), FEW), parts)](
        table, grad, in_order, places, starts, D=d, ROWS=MANY_ROWS, COLUMNS=MANY_COLUMNS, FEW=FEW, num_warps=4
    )


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
def many_kernel(
    table, grad, in_order, places, starts,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The row of the word at the sorted place FEW·n, if it has more than FEW places and this is the first such
    place of it: every such word has one."""
    here = tl.program_id(0) * FEW
    word = tl.load(in_order + here).to(tl.int64)
    start = tl.load(starts + word)
    end = tl.load(starts + word + 1)
    if (end - start > FEW) & (here - start < FEW):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = _sum_of_places(grad, places, start, end, column, D, ROWS, COLUMNS)
        tl.store(table + word * D + column, total.to(table.dtype.element_ty), mask=column < D)
