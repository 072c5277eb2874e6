"""Triton kernels of a step with many rows: products, and what comes between them.

64 rows of 768 numbers are 98 kB, which every program of a map would read whole. So a product may be cut along its
inputs too, and what comes behind it adds up the parts: attention, the gate, or the addition to x with the next
norm. A product by cuBLAS is one part.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from altup.kernels.decoding.attention import programmed, sum_of_parts
from altup.kernels.decoding.maps import Update, _gelu

MOST_ROWS_OF_TILE = 64
GATED = 1024  # outputs of a program of the gate


class Tile(NamedTuple):
    """Of a product: a program's outputs, the inputs it sums over and how many of them it reads at once."""

    columns: int
    span: int
    depth: int
    stages: int


# By outputs and inputs: T5-base's products in bfloat16. On an H200 a step of 64 rows takes 0.79 ms with them, 0.89
# by cuBLAS, which multiplies everything that has not been timed.
TILES = {
    (2304, 768): Tile(32, 768, 128, 4),
    (768, 768): Tile(64, 128, 128, 3),
    (4096, 768): Tile(32, 768, 128, 4),
    (768, 2048): Tile(32, 512, 128, 4),
}


@triton.jit
def product_kernel(
    out,
    x,
    weight,
    batch,
    n,
    k,
    span,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SINGLE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """out: [splits, batch, n], float32. `SINGLE`: the program's weights are one block, read before it waits."""
    split = tl.program_id(1)
    b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = split * span + tl.arange(0, BLOCK_K)
    weights = weight + c.to(tl.int64)[None, :] * k + inputs[:, None]
    rows = x + b[:, None] * k + inputs[None, :]
    if SINGLE:
        some = tl.load(weights, mask=(inputs < k)[:, None] & (c < n)[None, :], other=0.0)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    if SINGLE:
        part = tl.load(rows, mask=(b < batch)[:, None] & (inputs < k)[None, :], other=0.0)
        y = tl.dot(part, some, input_precision="ieee")
    else:
        y = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
        for start in range(0, span, BLOCK_K):
            inside = start + inputs < k
            part = tl.load(rows + start, mask=(b < batch)[:, None] & inside[None, :], other=0.0)
            some = tl.load(weights + start, mask=inside[:, None] & (c < n)[None, :], other=0.0)
            y = tl.dot(part, some, y, input_precision="ieee")
    places = (split * batch + b).to(tl.int64)[:, None] * n + c[None, :]
    tl.store(out + places, y, mask=(b < batch)[:, None] & (c < n)[None, :])


@triton.jit
def gate_kernel(out, parts, batch, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    """parts: [SPLITS, batch, 2n], of which the first n are the gate's → [batch, n]."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    at = parts + row.to(tl.int64) * 2 * n + columns
    gate = sum_of_parts(at, batch * 2 * n, mask, SPLITS)
    linear = sum_of_parts(at + n, batch * 2 * n, mask, SPLITS)
    tl.store(out + row.to(tl.int64) * n + columns, (_gelu(gate) * linear).to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_kernel(
    outs,
    normed,
    x,
    parts,
    state,
    P,
    g,
    norm,
    batch,
    n,
    eps,
    SPLITS: tl.constexpr,
    K: tl.constexpr,
    ACTIVE: tl.constexpr,
    NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """y = x + Σ parts, which AltUp's update puts into K blocks; and the norm of y, or of the block NEXT."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    if norm is not None:
        scales = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    at = row.to(tl.int64) * n + columns
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        y += sum_of_parts(parts + at, batch * n, mask, SPLITS)
    if K > 1:
        blocks = ()
        for j in tl.static_range(K):
            blocks = blocks + (tl.load(state[j] + at, mask=mask, other=0.0).to(tl.float32),)
        computed = y
        for i in tl.static_range(K):
            g_i = tl.load(g + i).to(tl.float32)
            block = g_i * computed
            for j in tl.static_range(K):
                of_active = tl.load(P + ACTIVE * K + j).to(tl.float32)
                block += (tl.load(P + i * K + j).to(tl.float32) - g_i * of_active) * blocks[j]
            tl.store(outs[i] + at, block.to(outs[i].dtype.element_ty), mask=mask)
            if i == NEXT:
                y = block
    elif SPLITS > 0:
        tl.store(outs[0] + at, y.to(outs[0].dtype.element_ty), mask=mask)
    if norm is not None:
        y = y.to(x.dtype.element_ty).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / n + eps) * scales
        tl.store(normed + at, y.to(normed.dtype.element_ty), mask=mask)


def product(x: Tensor, weight: Tensor, programmatic: bool) -> Tensor:
    """x·weightᵀ as parts to be added, [parts, rows, n]; x: [rows, k], weight: [n, k] in the same dtype."""
    n, k = weight.shape
    tile = TILES.get((n, k)) if x.dtype == torch.bfloat16 else None
    return F.linear(x, weight)[None] if tile is None else product_by_tiles(x, weight, tile, programmatic)


def product_by_tiles(x: Tensor, weight: Tensor, tile: Tile, programmatic: bool) -> Tensor:
    (n, k), batch = weight.shape, len(x)
    splits = triton.cdiv(k, tile.span)
    block_b = min(MOST_ROWS_OF_TILE, max(16, triton.next_power_of_2(batch)))
    out = x.new_empty(splits, batch, n, dtype=torch.float32)
    grid = (triton.cdiv(n, tile.columns), splits, triton.cdiv(batch, block_b))
    with torch.cuda.device_of(x):
        product_kernel[grid](
            out, x, weight, batch, n, k, tile.span, BLOCK_B=block_b, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
            SINGLE=tile.span == tile.depth, num_warps=4, num_stages=tile.stages, **programmed(programmatic),
        )  # fmt: skip
    return out


def gate(parts: Tensor, dtype: torch.dtype, programmatic: bool) -> Tensor:
    splits, batch, n = parts.shape
    n //= 2
    out = parts.new_empty(batch, n, dtype=dtype)
    with torch.cuda.device_of(parts):
        gate_kernel[(batch, triton.cdiv(n, GATED))](
            out, parts, batch, n, SPLITS=splits, BLOCK=min(GATED, triton.next_power_of_2(n)), num_warps=4,
            **programmed(programmatic),
        )  # fmt: skip
    return out


def add(
    x: Tensor,
    parts: Tensor | None,
    norm: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    programmatic: bool,
    update: Update | None = None,
    following: int = 0,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """x + Σ parts, or the blocks that AltUp's update makes of it; and the norm of that, or of block `following`,
    in `dtype`."""
    batch, n = x.shape
    normed = None if norm is None else x.new_empty(batch, n, dtype=dtype)
    state = P = g = None
    if update is not None:
        state, P, g = update.state, update.P.contiguous(), update.g.contiguous()
        outs = tuple(map(torch.empty_like, state))
    else:
        outs = (x,) if parts is None else (torch.empty_like(x),)
    with torch.cuda.device_of(x):
        add_kernel[(batch,)](
            outs, normed, x, parts, state, P, g, norm, batch, n, eps, SPLITS=0 if parts is None else len(parts),
            K=len(outs), ACTIVE=0 if update is None else update.active, NEXT=following,
            BLOCK=triton.next_power_of_2(n), num_warps=4, **programmed(programmatic),
        )  # fmt: skip
    return outs, normed
