"""Triton kernels of what stands between the maps of queries and keys and attention: norm and rotary positions.

With r = 1 / rms(x) of a head's D numbers, n = w ∘ x r, halves n₁, n₂ of it and those of cos and sin:

    forward     out = (n₁ cos₁ − n₂ sin₁, n₂ cos₂ + n₁ sin₂)
    backward    dn = (G₁ cos₁ + G₂ sin₂, G₂ cos₂ − G₁ sin₁),    dw = Σ dn ∘ x r,
                dx = r (w ∘ dn − x r² ⟨w ∘ dn, x⟩ / D)

A program takes some heads of some tokens; backward it walks on and adds up its share of dw.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import load, store
from altup.kernels.launch import ceil_div, flat, multiprocessors, power_of_two
from altup.kernels.operators import Gradients, operator

HEADS, WARPS = 8, 4  # of a program; not timed yet
PROGRAMS_PER_SM = 8  # backward


@triton.jit
def _places(first, heads, D, rows, period, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Of `ROWS` heads from the first: where each begins in x, and its token's place in cos and sin; the mask."""
    row = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    mask = (row < rows) & (columns < D // 2)
    return row.to(tl.int64) * D + columns, ((row // heads) % period) * D + columns, mask


@triton.jit
def _forward_kernel(out, x, weight, cos, sin, rows, heads, period, D, eps, ROWS: tl.constexpr, HALF: tl.constexpr):
    lanes, places, mask = _places(tl.program_id(0) * ROWS, heads, D, rows, period, ROWS, HALF)
    half = D // 2
    columns = tl.zeros([ROWS, HALF], tl.int32) + tl.arange(0, HALF)[None, :]  # in the layout of x
    a, b = load(x, 0, lanes, mask), load(x, half, lanes, mask)
    inverse = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1)[:, None] / D + eps)
    a *= inverse * load(weight, 0, columns, columns < half)
    b *= inverse * load(weight, half, columns, columns < half)
    store(out, 0, lanes, a * load(cos, 0, places, mask) - b * load(sin, 0, places, mask), mask)
    store(out, half, lanes, b * load(cos, half, places, mask) + a * load(sin, half, places, mask), mask)


@triton.jit
def _backward_kernel(
    dx, sums, grad, x, weight, cos, sin, rows, heads, period, D, eps, ROWS: tl.constexpr, HALF: tl.constexpr
):
    half = D // 2
    columns = tl.zeros([ROWS, HALF], tl.int32) + tl.arange(0, HALF)[None, :]  # in the layout of x
    inside = columns < half
    weight_a, weight_b = load(weight, 0, columns, inside), load(weight, half, columns, inside)
    total_a = tl.zeros([ROWS, HALF], tl.float32)
    total_b = tl.zeros([ROWS, HALF], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        lanes, places, mask = _places(first, heads, D, rows, period, ROWS, HALF)
        a, b = load(x, 0, lanes, mask), load(x, half, lanes, mask)
        g_a, g_b = load(grad, 0, lanes, mask), load(grad, half, lanes, mask)
        inverse = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1)[:, None] / D + eps)
        d_a = g_a * load(cos, 0, places, mask) + g_b * load(sin, half, places, mask)
        d_b = g_b * load(cos, half, places, mask) - g_a * load(sin, 0, places, mask)
        total_a += d_a * a * inverse
        total_b += d_b * b * inverse
        d_a *= weight_a
        d_b *= weight_b
        share = tl.sum(d_a * a + d_b * b, axis=1)[:, None] * inverse * inverse / D
        store(dx, 0, lanes, inverse * (d_a - share * a), mask)
        store(dx, half, lanes, inverse * (d_b - share * b), mask)
    start = tl.program_id(0) * D + tl.arange(0, HALF)
    tl.store(sums + start, tl.sum(total_a, axis=0), mask=tl.arange(0, HALF) < half)
    tl.store(sums + start + half, tl.sum(total_b, axis=0), mask=tl.arange(0, HALF) < half)


@operator("altup::gemma3n_rotary")
def rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Iterator[Tensor]:
    """x normed and turned: [batch, tokens, heads, D]; cos and sin: [batch or 1, tokens, D]."""
    heads, D = x.shape[-2:]
    rows = x.numel() // D
    out = x.new_empty(x.shape)
    yield out
    x, weight, cos, sin = flat((x, weight, cos, sin))
    if rows:
        _forward_kernel[(ceil_div(rows, HEADS),)](
            out, x, weight, cos, sin, rows, heads, cos.numel() // D, D, eps,
            ROWS=HEADS, HALF=power_of_two(D // 2), num_warps=WARPS,
        )  # fmt: skip


@operator("altup::gemma3n_rotary_backward")
def rotary_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of x and, in float32, of weight."""
    heads, D = x.shape[-2:]
    rows = x.numel() // D
    dx, d_weight = x.new_empty(x.shape), weight.new_empty(D, dtype=torch.float32)
    yield dx, d_weight
    if not rows:
        d_weight.zero_()
        return
    grad, x, weight, cos, sin = flat((grad, x, weight, cos, sin))
    programs = min(ceil_div(rows, HEADS), multiprocessors(x.device) * PROGRAMS_PER_SM)
    sums = x.new_empty(programs, D, dtype=torch.float32)
    _backward_kernel[(programs,)](
        dx, sums, grad, x, weight, cos, sin, rows, heads, cos.numel() // D, D, eps,
        ROWS=HEADS, HALF=power_of_two(D // 2), num_warps=WARPS,
    )  # fmt: skip
    torch.sum(sums, dim=0, out=d_weight)


@rotary.gradient
def _(d_out: Tensor, *, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Gradients:
    dx, d_weight = rotary_backward(d_out, x, weight, cos, sin, eps)
    return {"x": dx, "weight": d_weight.to(weight.dtype)}
