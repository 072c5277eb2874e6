"""Two products of the feed-forward with GEGLU at their end: that into the hidden layer, and the gradient's.

Where rows are short, a product is as fast as its numbers are read and written. What GEGLU reads and writes again
is then as much as the product itself, and is spared here.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.geglu.triton import gelu_share, gelu_slope


class Tile(NamedTuple):
    """Rows and columns of a program's result, what is summed at a time, warps, and loads in flight."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


FORWARD = Tile(128, 64, 64, 8, 3)
BACKWARD = Tile(64, 64, 64, 4, 3)


def forward(h: Tensor, hidden: Tensor, x: Tensor, wi: Tensor) -> None:
    """h = x·wiᵀ [rows, 2·n] and its GEGLU, hidden [rows, n]; x: [rows, d], wi: [2·n, d]."""
    (rows, d), n = x.shape, hidden.shape[1]
    tile = _fit(FORWARD, d, n)
    forward_kernel[(triton.cdiv(rows, tile.rows) * (n // tile.columns),)](
        h, hidden, x, wi, rows, D=d, N=n, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward(d_h: Tensor, grad: Tensor, wo: Tensor, h: Tensor) -> None:
    """d_h [rows, 2·n], the gradient of h where grad·wo is that of `hidden`; grad: [rows, d], wo: [d, n]."""
    rows, d = grad.shape
    n = wo.shape[1]
    tile = _fit(BACKWARD, d, n)
    backward_kernel[(triton.cdiv(rows, tile.rows) * (n // tile.columns),)](
        d_h, grad, wo, h, rows, D=d, N=n, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _fit(tile: Tile, d: int, n: int) -> Tile:
    """Columns and steps that divide n and d, which are multiples of 16."""
    return tile._replace(columns=min(tile.columns, n & -n), step=min(tile.step, d & -d))


@triton.jit
def forward_kernel(
    h, hidden, x, wi, rows,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Neighbouring programs have the same rows, which one of them reads from memory."""
    across: tl.constexpr = N // COLUMNS
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column, step = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    inside = (row < rows)[:, None]
    at_x, at_w = x + row[:, None] * D + step[None, :], wi + column[:, None] * D + step[None, :]
    gate, linear = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, D, STEP):
        left = tl.load(at_x, mask=inside, other=0.0)
        gate = tl.dot(left, tl.trans(tl.load(at_w)), gate, input_precision="ieee")
        linear = tl.dot(left, tl.trans(tl.load(at_w + N * D)), linear, input_precision="ieee")
        at_x += STEP
        at_w += STEP
    place = h + row[:, None] * (2 * N) + column[None, :]
    gate, linear = gate.to(h.dtype.element_ty), linear.to(h.dtype.element_ty)
    tl.store(place, gate, mask=inside)
    tl.store(place + N, linear, mask=inside)
    a = gate.to(tl.float32)
    result = a * gelu_share(a) * linear.to(tl.float32)
    tl.store(hidden + row[:, None] * N + column[None, :], result.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    d_h, grad, wo, h, rows,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = N // COLUMNS
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column, step = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    inside = (row < rows)[:, None]
    at_grad, at_w = grad + row[:, None] * D + step[None, :], wo + step[:, None] * N + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, D, STEP):
        left = tl.load(at_grad, mask=inside, other=0.0)
        total = tl.dot(left, tl.load(at_w), total, input_precision="ieee")
        at_grad += STEP
        at_w += STEP * N
    d = total.to(h.dtype.element_ty).to(tl.float32)  # as a product of its own would give it
    place = row[:, None] * (2 * N) + column[None, :]
    a = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(h + place + N, mask=inside, other=0.0).to(tl.float32)
    s = gelu_share(a)
    d_gate = d * b * gelu_slope(a, s)
    tl.store(d_h + place, d_gate.to(d_h.dtype.element_ty), mask=inside)
    tl.store(d_h + place + N, (d * a * s).to(d_h.dtype.element_ty), mask=inside)
