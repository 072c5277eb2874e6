"""The kernels of addition and norm. A program holds whole rows.

With s the sum, r = 1 / √(mean(s²) + ε), n the gradient of the norm's result, d that of s, and z what dropout
multiplies the update by,

    d_x = d + r·(n·w − s·r²·mean(n·w·s)),   d_update = z·d_x,   d_w = Σ n·s·r.

Backward, a few programs walk through all rows and keep the sums of the weight's gradient to themselves until the
end; a second kernel adds them up. Nothing is added across programs in an order that varies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout.reference import drop_below, keep_scale
from altup.kernels.dropout.triton import of_sequences, stream_keys, stream_words, upper_halves
from altup.kernels.fp8.reference import VALUE
from altup.kernels.fp8.triton import VALUE_MAX, power_of_two
from altup.kernels.launch import ceil_div, flat, multiprocessors
from altup.kernels.operators import Gradients, operator

TILE = 4096  # numbers of a program's rows forward, and backward at a time, where three arrays are read
BACKWARD_TILE = 1024
WARPS = 4
PROGRAMS_PER_SM = 8
SUMMED = (1024, 8)  # at most so many programs, and so many columns, the second kernel reads at a time


@operator("altup::add_norm")
def add_norm_op(
    x: Tensor, update: Tensor, weight: Tensor, seed: Tensor | None, eps: float, p: float, fp8: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """The sum, its norm, and 1 / √(mean(s²) + ε) of each row, float32; all given tensors are contiguous. Dropout
    has a seed [1], int64, or in its place the factors of each sequence, [..., 1, d], float32.

    With `fp8` the norm is not written: it is there for its gradient. In its place are written what fp8 makes of
    it, and that's scale, which are else empty.
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
    q = x.new_empty(x.shape if fp8 else 0, dtype=VALUE if fp8 else torch.float32)
    scale = x.new_empty(() if fp8 else 0, dtype=torch.float32)
    yield total, normed, rms, q, scale
    rows, d, block, tile = _sizes(x, TILE)
    forward_kernel[(ceil_div(rows, tile),)](
        total, normed, rms, *((q, scale) if fp8 else (None, None)), x, update, weight, seed, rows, eps,
        drop_below(p), keep_scale(p), d**0.5,
        D=d, BLOCK=block, ROWS=tile, DROPOUT=seed is not None, LOW=fp8, num_warps=WARPS, **of_sequences(seed, x),
    )  # fmt: skip


@operator("altup::add_norm_backward")
def add_norm_backward(
    d_total: Tensor, d_normed: Tensor, total: Tensor, rms: Tensor, weight: Tensor, seed: Tensor | None, p: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The gradients of x, of the update (empty without dropout, where it is x's) and of the weight."""
    dx, d_weight = torch.empty_like(total), torch.empty_like(weight)
    d_update = total.new_empty(0 if seed is None else total.shape)
    yield dx, d_update, d_weight
    rows, d, block, tile = _sizes(total, BACKWARD_TILE)
    programs = min(ceil_div(rows, tile), PROGRAMS_PER_SM * multiprocessors(total.device))
    sums = rms.new_empty(programs, d)
    backward_kernel[(programs,)](
        dx, d_update, sums, *flat((d_total, d_normed)), total, rms, weight, seed, rows, drop_below(p),
        keep_scale(p), **of_sequences(seed, total),
        D=d, BLOCK=block, ROWS=tile, DROPOUT=seed is not None, num_warps=WARPS,
    )  # fmt: skip
    sum_columns(d_weight, sums)


@add_norm_op.gradient
def _(
    d_total: Tensor, d_normed: Tensor, _rms: None, _q: None, _scale: None, *, total: Tensor, rms: Tensor,
    weight: Tensor, seed: Tensor | None, p: float,
) -> Gradients:  # fmt: skip
    dx, d_update, d_weight = add_norm_backward(d_total, d_normed, total, rms, weight, seed, p)
    return {"x": dx, "update": dx if seed is None else d_update, "weight": d_weight}


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
    offset = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    result = (s * r[:, None] * w[None, :]).to(normed.dtype.element_ty)
    if LOW:
        bound = (tl.max(tl.abs(w), 0) * root).to(weight.dtype.element_ty).to(tl.float32)
        own = power_of_two(bound, VALUE_MAX)
        if tl.program_id(0) == 0:
            tl.store(scale, own)
        tl.store(q + offset, (result.to(tl.float32) * tl.div_rn(1.0, own)).to(q.dtype.element_ty), mask=inside)
    else:
        tl.store(normed + offset, result, mask=inside)


@triton.jit(do_not_specialize=["drop_below"])
def forward_kernel(
    total, normed, rms, q, scale, x, update, weight, seed, rows, eps, drop_below, keep_scale, root, tokens,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPOUT: tl.constexpr, LOW: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    s = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(update + offset, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        u *= _factors(seed, row, rows, drop_below, keep_scale, tokens, D, BLOCK, ROWS, SHARED)
    rounded = (s + u).to(total.dtype.element_ty)
    tl.store(total + offset, rounded, mask=inside)
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
        offset = row[:, None] * D + column[None, :]
        inside = (row < rows)[:, None] & (column < D)[None, :]
        s = tl.load(total + offset, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(d_normed + offset, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_total + offset, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rms + row, mask=row < rows, other=0.0)[:, None]
        unit = s * r
        acc += n * unit
        n *= w
        mean = tl.sum(n * unit, 1)[:, None] / D
        d += r * (n - unit * mean)
        tl.store(dx + offset, d.to(dx.dtype.element_ty), mask=inside)
        if DROPOUT:
            d *= _factors(seed, row, rows, drop_below, keep_scale, tokens, D, BLOCK, ROWS, SHARED)
            tl.store(d_update + offset, d.to(d_update.dtype.element_ty), mask=inside)
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
