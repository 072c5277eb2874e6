"""Triton kernels of Adafactor, for many matrices of one shape at a time: three passes over the gradients in all.

What each program adds up it writes once, and the parts are added in a fixed order, so that results are the same
bit for bit from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.multi_tensor import TensorList, pointer

ROWS = 32  # rows of a program's piece
ELEMENTS = 4096  # numbers that a program holds at a time


@triton.jit
def _piece(addresses, like, rows, columns, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places and mask of the program's rows, from column `start` on."""
    matrix = pointer(addresses, like, tl.program_id(0))
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = start + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return matrix + i[:, None].to(tl.int64) * columns + j[None, :], inside, i, j


@triton.jit
def _squares_kernel(
    grads, grad_like, weights, weight_like, by_row, by_column, of_weights, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    of_rows = tl.zeros([ROWS], tl.float32)
    of_weight = tl.zeros([ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        offsets, inside, i, j = _piece(grads, grad_like, rows, columns, start, ROWS, COLUMNS)
        g = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
        of_rows += tl.sum(g * g, 1)
        tl.store(by_column + (n * parts + part) * columns + j, tl.sum(g * g, 0), mask=j < columns)
        offsets, inside, i, j = _piece(weights, weight_like, rows, columns, start, ROWS, COLUMNS)
        w = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(w * w, 1)
    i = part * ROWS + tl.arange(0, ROWS)
    tl.store(by_row + n * rows + i, of_rows, mask=i < rows)
    tl.store(of_weights + n * parts + part, tl.sum(of_weight))


@triton.jit
def _size_kernel(
    grads, grad_like, row_factor, column_factor, sizes, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    n, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i = part * ROWS + tl.arange(0, ROWS)
    of_row = tl.load(row_factor + n * rows + i, mask=i < rows, other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        offsets, inside, _, j = _piece(grads, grad_like, rows, columns, start, ROWS, COLUMNS)
        g = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
        u = g * of_row[:, None] * tl.load(column_factor + n * columns + j, mask=j < columns, other=0.0)[None, :]
        total += tl.sum(u * u, 1)
    tl.store(sizes + n * parts + part, tl.sum(total))


@triton.jit
def _descend_kernel(
    weights, weight_like, grads, grad_like, row_factor, column_factor, scale, skip, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    n, part = tl.program_id(0), tl.program_id(1)
    i = part * ROWS + tl.arange(0, ROWS)
    of_row = tl.load(row_factor + n * rows + i, mask=i < rows, other=0.0)
    step = tl.load(scale + n)
    for start in range(0, columns, COLUMNS):
        offsets, inside, _, j = _piece(grads, grad_like, rows, columns, start, ROWS, COLUMNS)
        g = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
        u = g * of_row[:, None] * tl.load(column_factor + n * columns + j, mask=j < columns, other=0.0)[None, :]
        offsets, inside, _, j = _piece(weights, weight_like, rows, columns, start, ROWS, COLUMNS)
        w = tl.load(offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(offsets, (w - step * u).to(weight_like.dtype.element_ty), mask=inside)


def squares(grads: TensorList, weights: TensorList) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the gradients' squares along rows [n, rows] and columns [n, columns], and of the weights' [n]."""
    (rows, columns), (n, parts) = grads.like.shape, _grid(grads)
    new = grads.addresses.new_empty
    by_row = new(n, rows, dtype=torch.float32)
    by_column = new(n, parts, columns, dtype=torch.float32)
    of_weights = new(n, parts, dtype=torch.float32)
    with torch.cuda.device_of(by_row):
        _squares_kernel[_grid(grads)](
            *grads, *weights, by_row, by_column, of_weights, rows, columns, ROWS=ROWS, COLUMNS=_columns(columns)
        )
    return by_row, by_column.sum(1), of_weights.sum(1)


def update_squares(grads: TensorList, row_factor: Tensor, column_factor: Tensor) -> Tensor:
    """[n]: sums of squares of U = G · (row_factor ⊗ column_factor), for factors [n, rows] and [n, columns]."""
    (rows, columns), (n, parts) = grads.like.shape, _grid(grads)
    sizes = row_factor.new_empty(n, parts)
    with torch.cuda.device_of(sizes):
        _size_kernel[_grid(grads)](
            *grads, row_factor, column_factor, sizes, rows, columns, ROWS=ROWS, COLUMNS=_columns(columns)
        )
    return sizes.sum(1)


def descend(
    weights: TensorList, grads: TensorList, row_factor: Tensor, column_factor: Tensor, scale: Tensor, skip: Tensor
) -> None:
    """W ← W − scale · U in place; nothing where the bool scalar `skip` is true."""
    rows, columns = grads.like.shape
    with torch.cuda.device_of(scale):
        _descend_kernel[_grid(grads)](
            *weights, *grads, row_factor, column_factor, scale, skip.to(torch.int32), rows, columns,
            ROWS=ROWS, COLUMNS=_columns(columns),
        )  # fmt: skip


def _grid(matrices: TensorList) -> tuple[int, int]:
    return len(matrices.addresses), triton.cdiv(matrices.like.shape[0], ROWS)


def _columns(columns: int) -> int:
    return min(ELEMENTS // ROWS, triton.next_power_of_2(columns))
