"""Products whose results are whole short rows, with the residual addition and the norm at their end.

A program holds some whole rows of the result. Where rows are short, a product is as fast as its numbers are read
and written: what an addition and a norm would write and read again between products is spared.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.add_norm.triton import sum_columns


class Tile(NamedTuple):
    """Rows of a program, what is summed at a time, warps, and loads in flight."""

    rows: int
    step: int
    warps: int
    stages: int


FORWARD = Tile(64, 64, 8, 3)
BACKWARD = Tile(64, 64, 8, 3)


def forward(
    total: Tensor, normed: Tensor, rms: Tensor, x: Tensor, a: Tensor, w: Tensor, norm_weight: Tensor, eps: float
) -> None:
    """total = x + a·wᵀ [rows, d], its norm, and 1 / rms of each row; a: [rows, k], w: [d, k]."""
    (rows, d), k = x.shape, a.shape[1]
    tile = FORWARD
    forward_kernel[(triton.cdiv(rows, tile.rows),)](
        total, normed, rms, x, a, w, norm_weight, rows, eps,
        K=k, D=d, ROWS=tile.rows, STEP=min(tile.step, k & -k), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward(
    dx: Tensor, d_weight: Tensor, d_total: Tensor, dy: Tensor, following: Tensor, total: Tensor, rms: Tensor,
    norm_weight: Tensor,
) -> None:  # fmt: skip
    """dx, the gradient of `total` with that through its norm, whose result has the gradient dy·following, and the
    norm weight's; dy: [rows, n], following: [n, d]."""
    (rows, d), n = total.shape, dy.shape[1]
    tile = BACKWARD
    programs = triton.cdiv(rows, tile.rows)
    sums = rms.new_empty(programs, d)
    backward_kernel[(programs,)](
        dx, sums, d_total, dy, following, total, rms, norm_weight, rows,
        N=n, D=d, ROWS=tile.rows, STEP=min(tile.step, n & -n), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    sum_columns(d_weight, sums)


@triton.jit
def forward_kernel(
    total, normed, rms, x, a, w, norm_weight, rows, eps,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, step = tl.arange(0, D), tl.arange(0, STEP)
    inside = (row < rows)[:, None]
    at_a, at_w = a + row[:, None] * K + step[None, :], w + column[:, None] * K + step[None, :]
    update = tl.zeros([ROWS, D], tl.float32)
    for _ in range(0, K, STEP):
        left = tl.load(at_a, mask=inside, other=0.0)
        update = tl.dot(left, tl.trans(tl.load(at_w)), update, input_precision="ieee")
        at_a += STEP
        at_w += STEP
    place = row[:, None] * D + column[None, :]
    s = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    s += update.to(x.dtype.element_ty).to(tl.float32)  # rounded, as a product of its own would be
    rounded = s.to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    s = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 1) / D + eps)
    tl.store(rms + row, r, mask=row < rows)
    g = tl.load(norm_weight + column).to(tl.float32)
    tl.store(normed + place, (s * r[:, None] * g[None, :]).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    dx, sums, d_total, dy, following, total, rms, norm_weight, rows,
    N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`sums` [programs, D] are the program's share of the norm weight's gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, step = tl.arange(0, D), tl.arange(0, STEP)
    inside = (row < rows)[:, None]
    at_dy, at_w = dy + row[:, None] * N + step[None, :], following + step[:, None] * D + column[None, :]
    n = tl.zeros([ROWS, D], tl.float32)
    for _ in range(0, N, STEP):
        n = tl.dot(tl.load(at_dy, mask=inside, other=0.0), tl.load(at_w), n, input_precision="ieee")
        at_dy += STEP
        at_w += STEP * D
    n = n.to(dx.dtype.element_ty).to(tl.float32)  # rounded, as a product of its own would be
    place = row[:, None] * D + column[None, :]
    r = tl.load(rms + row, mask=row < rows, other=0.0)[:, None]
    unit = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * r
    tl.store(sums + tl.program_id(0) * D + column, tl.sum(n * unit, 0))
    n *= tl.load(norm_weight + column).to(tl.float32)[None, :]
    mean = tl.sum(n * unit, 1)[:, None] / D
    d = tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32) + r * (n - unit * mean)
    tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
