"""The kernels of addition and norm. A program holds whole rows.

Backward, a few programs walk through all rows and keep the sums of the weight's gradient to themselves until the
end; a second kernel adds them up. Nothing is added across programs in an order that varies.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout.reference import drop_below, keep_scale
from altup.kernels.dropout.triton import of_sequences, stream_keys, stream_words, upper_halves
from altup.kernels.fp8.triton import VALUE_MAX, power_of_two
from altup.kernels.launch import multiprocessors

TILE = 4096  # numbers of a program's rows forward, and backward at a time, where three arrays are read
BACKWARD_TILE = 1024
WARPS = 4
PROGRAMS_PER_SM = 8
SUMMED = (1024, 8)  # at most so many programs, and so many columns, the second kernel reads at a time


def forward(
    total: Tensor, normed: Tensor, rms: Tensor, x: Tensor, update: Tensor, weight: Tensor, seed: Tensor | None,
    eps: float, p: float, q: Tensor | None = None, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """With q and its `scale` the norm's result is written into them, in 8 bits, and `normed` is left as it is."""
    rows, d, block, tile = _sizes(x, TILE)
    forward_kernel[(triton.cdiv(rows, tile),)](
        total, normed, rms, q, scale, x, update, weight, seed, rows, eps, drop_below(p), keep_scale(p), d**0.5,
        D=d, BLOCK=block, ROWS=tile, DROPOUT=seed is not None, LOW=q is not None, num_warps=WARPS,
        **of_sequences(seed, x),
    )  # fmt: skip


def backward(
    dx: Tensor, d_update: Tensor, d_weight: Tensor, d_total: Tensor, d_normed: Tensor, total: Tensor, rms: Tensor,
    weight: Tensor, seed: Tensor | None, p: float,
) -> None:  # fmt: skip
    rows, d, block, tile = _sizes(total, BACKWARD_TILE)
    programs = min(triton.cdiv(rows, tile), PROGRAMS_PER_SM * multiprocessors(total.device))
    sums = rms.new_empty(programs, d)
    backward_kernel[(programs,)](
        dx, d_update, sums, d_total, d_normed, total, rms, weight, seed, rows, drop_below(p), keep_scale(p),
        D=d, BLOCK=block, ROWS=tile, DROPOUT=seed is not None, num_warps=WARPS, **of_sequences(seed, total),
    )  # fmt: skip
    sum_columns(d_weight, sums)


def sum_columns(total: Tensor, sums: Tensor) -> None:
    """`total` [d] ← the columns' sums of [programs, d]: few long programs would wait for memory each time."""
    programs, d = sums.shape
    most, columns = SUMMED
    rows = min(most, triton.next_power_of_2(programs))
    sum_kernel[(triton.cdiv(d, columns),)](total, sums, programs, d, ROWS=rows, COLUMNS=columns, num_warps=8)


def _sizes(x: Tensor, numbers: int) -> tuple[int, int, int, int]:
    """Rows, their width and the power of two above it, and the rows of a program."""
    d = x.shape[-1]
    block = triton.next_power_of_2(d)
    return x.numel() // d, d, block, max(1, numbers // block)


@triton.jit
def _factors(
    seed, row, rows, drop_below, keep_scale, tokens,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """What dropout multiplies [ROWS, BLOCK] numbers by. SHARED: what the `tokens` rows of a sequence share."""
    if SHARED:
        column = tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        return tl.load(seed + (row // tokens)[:, None] * D + column[None, :], mask=inside, other=0.0)
    else:
        random = stream_keys(tl.load(seed), tl.zeros([], tl.int32))
        counter = row[:, None] * (D // 4) + tl.arange(0, BLOCK // 4)[None, :]
        upper, lower = stream_words(random, counter, counter >> 32)
        a, b = upper_halves(upper)
        c, d = upper_halves(lower)
        # join puts its two along a new last dimension: [..., word, half]
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, BLOCK])
        return tl.where(bits >= drop_below, keep_scale, 0.0)


@triton.jit
def store_normed(
    normed, rms, q, scale, rounded, weight, row, column, rows, eps, root,
    D: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """RMSNorm of whole rows, as they were rounded, and 1 / rms of each. LOW: not the norm's result but what fp8
    makes of it, with the scale of its bound √D · max |weight|, where `root` is √D."""
    s = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 1) / D + eps)
    tl.store(rms + row, r, mask=row < rows)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    place = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    result = (s * r[:, None] * w[None, :]).to(normed.dtype.element_ty)
    if LOW:
        bound = (tl.max(tl.abs(w), 0) * root).to(weight.dtype.element_ty).to(tl.float32)
        own = power_of_two(bound, VALUE_MAX)
        if tl.program_id(0) == 0:
            tl.store(scale, own)
        tl.store(q + place, (result.to(tl.float32) * tl.div_rn(1.0, own)).to(q.dtype.element_ty), mask=inside)
    else:
        tl.store(normed + place, result, mask=inside)


@triton.jit(do_not_specialize=["drop_below"])
def forward_kernel(
    total, normed, rms, q, scale, x, update, weight, seed, rows, eps, drop_below, keep_scale, root, tokens,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr, LOW: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    place = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    s = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        u *= _factors(seed, row, rows, drop_below, keep_scale, tokens, D, BLOCK, ROWS, SHARED)
    rounded = (s + u).to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=inside)
    store_normed(normed, rms, q, scale, rounded, weight, row, column, rows, eps, root, D, LOW)


@triton.jit(do_not_specialize=["drop_below"])
def backward_kernel(
    dx, d_update, sums, d_total, d_normed, total, rms, weight, seed, rows, drop_below, keep_scale, tokens,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place = row[:, None] * D + column[None, :]
        inside = (row < rows)[:, None] & (column < D)[None, :]
        s = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(d_normed + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rms + row, mask=row < rows, other=0.0)[:, None]
        unit = s * r
        acc += n * unit
        n *= w
        mean = tl.sum(n * unit, 1)[:, None] / D
        d += r * (n - unit * mean)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
        if DROPOUT:
            d *= _factors(seed, row, rows, drop_below, keep_scale, tokens, D, BLOCK, ROWS, SHARED)
            tl.store(d_update + place, d.to(d_update.dtype.element_ty), mask=inside)
    tl.store(sums + tl.program_id(0) * D + column, tl.sum(acc, 0), mask=column < D)


@triton.jit
def sum_kernel(d_weight, sums, programs, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns' sums over all programs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (column < d)[None, :]
        acc += tl.load(sums + row[:, None] * d + column[None, :], mask=inside, other=0.0)
    tl.store(d_weight + column, tl.sum(acc, 0).to(d_weight.dtype.element_ty), mask=column < d)
