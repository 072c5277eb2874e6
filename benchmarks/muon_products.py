"""Another kernel for Muon's symmetric products (`altup/kernels/muon/gram.py`), which `tune_muon.py` times.

That one stores the tiles on the diagonal, 6 of 21 at a width of 768, number by number. Here such a tile becomes
symmetric in registers and is stored in whole words; what is added is loaded before the loop, where registers are
free; and a tile may be two squares side by side, which reads a seventh less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a tile of the result, and what is summed at a time.
TILE, STEP = (128, 128), 64
WARPS, STAGES = 4, 3


@triton.jit
def _symmetric_kernel(
    left, right, added, out, m, k, alpha, beta, gamma,
    TALL: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """out = alpha·left·rightᵀ + beta·added + gamma·1 [n, m, m], which is symmetric, from left and right [n, m, k].

    TALL: they are [n, k, m]. A program computes a tile, a square or two side by side, that has a part below the
    diagonal or on it, and writes that part to its mirrored place too. EVEN: m and k are whole tiles.
    """
    across = tl.cdiv(m, COLUMNS)
    i, j, n = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS, tl.program_id(1).to(tl.int64)
    if i + ROWS <= j:
        return
    rows, columns = i + tl.arange(0, ROWS), j + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    if TALL:
        at_left = left + n * m * k + step[:, None] * m + rows[None, :]
        at_right = right + n * m * k + step[:, None] * m + columns[None, :]
    else:
        at_left = left + n * m * k + rows[:, None] * k + step[None, :]
        at_right = right + n * m * k + columns[:, None] * k + step[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if ADDS:  # before the loop, where registers are free
        place = added + n * m * m + rows[:, None] * m + columns[None, :]
        if EVEN:
            total = tl.load(place).to(tl.float32) * (beta / alpha)
        else:
            square = (rows < m)[:, None] & (columns < m)[None, :]
            total = tl.load(place, mask=square, other=0.0).to(tl.float32) * (beta / alpha)
        if i < j + COLUMNS:
            total += tl.where(rows[:, None] == columns[None, :], gamma / alpha, 0.0)
    for start in range(0, k, STEP):
        if EVEN:
            a, b = tl.load(at_left), tl.load(at_right)
        elif TALL:
            inside = (start + step < k)[:, None]
            a = tl.load(at_left, mask=inside & (rows < m)[None, :], other=0.0)
            b = tl.load(at_right, mask=inside & (columns < m)[None, :], other=0.0)
        else:
            inside = (start + step < k)[None, :]
            a = tl.load(at_left, mask=inside & (rows < m)[:, None], other=0.0)
            b = tl.load(at_right, mask=inside & (columns < m)[:, None], other=0.0)
        if TALL:
            total = tl.dot(tl.trans(a), b, total)
            at_left += STEP * m
            at_right += STEP * m
        else:
            total = tl.dot(a, tl.trans(b), total)
            at_left += STEP
            at_right += STEP
    result = (total * alpha).to(out.dtype.element_ty)
    out += n * m * m
    if ROWS == COLUMNS:
        _write(out, result, i, j, m, EVEN, ROWS)
    else:
        left_half, right_half = tl.split(tl.permute(tl.reshape(result, [ROWS, 2, ROWS]), (0, 2, 1)))
        _write(out, left_half, i, j, m, EVEN, ROWS)
        if i >= j + ROWS:
            _write(out, right_half, i, j + ROWS, m, EVEN, ROWS)


@triton.jit
def _write(out, result, i, j, m, EVEN: tl.constexpr, TILE: tl.constexpr):
    """A square tile, of row i and column j ≤ i on: to its place and the mirrored one."""
    rows, columns = i + tl.arange(0, TILE), j + tl.arange(0, TILE)
    if i == j:  # where a product is not symmetric to the last bit, and the next ones would magnify that
        result = tl.where(rows[:, None] >= columns[None, :], result, tl.trans(result))
    place, mirrored = out + rows[:, None] * m + columns[None, :], out + columns[:, None] * m + rows[None, :]
    if EVEN:
        tl.store(place, result)
        if i != j:
            tl.store(mirrored, tl.trans(result))
    else:
        tl.store(place, result, mask=(rows < m)[:, None] & (columns < m)[None, :])
        if i != j:
            tl.store(mirrored, tl.trans(result), mask=(columns < m)[:, None] & (rows < m)[None, :])


def symmetric_product(
    left: Tensor, right: Tensor, *, tall: bool = False, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """alpha·left·rightᵀ + beta·right + gamma·1, [n, m, m], of matrices [n, m, k] whose product is symmetric.

    With `tall` they are [n, k, m], and it is alpha·leftᵀ·right. `right` can be added where k = m.
    """
    n, m, k = left.shape
    if tall:
        m, k = k, m
    most = max(16, triton.next_power_of_2(m))
    rows, columns = min(TILE[0], most), min(TILE[1], most)
    step = min(STEP, max(16, triton.next_power_of_2(k)))
    if out is None:
        out = left.new_empty(n, m, m)
    with torch.cuda.device_of(out):
        _symmetric_kernel[triton.cdiv(m, rows) * triton.cdiv(m, columns), n](
            left, right, right, out, m, k, alpha, beta, gamma, TALL=tall, ADDS=bool(beta or gamma),
            EVEN=m % rows == 0 and m % columns == 0 and k % step == 0, ROWS=rows, COLUMNS=columns, STEP=step,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out
