"""Triton kernels of linear maps for few rows, and of the head for any number: what they take is the time to read
the weights.

A norm before the map, the gate of a feed-forward and the addition behind it are part of it. So is the search for
the largest output: of the head nothing but that is wanted; and, of one row, AltUp's update of the K blocks with a
layer's output, x_newⁱ = Σⱼ (Pᵢⱼ − gᵢ Pₐⱼ) xʲ + gᵢ y (`kernels/altup_update`). One row is multiplied by plain
arithmetic (`vector_kernel`), more by tensor cores (`rows_kernel`).

`PROGRAMMATIC` kernels begin before the kernel before them has ended: they read their weights, which nobody writes,
and then wait for it.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from altup.kernels.decoding.attention import Parts, programmed

LOWEST = tl.constexpr(float("-inf"))
NOWHERE = tl.constexpr(2**31 - 1)
TILE = 2048  # numbers of the weights that a program of the vector kernel holds
MANY = 8192  # outputs: a head's, whose tiles are larger
# Of the rows kernel: rows, outputs and inputs of a tile, and of a head's.
ROWS, COLUMNS, DEPTH = 32, 16, 256
HEAD_ROWS, HEAD_COLUMNS, HEAD_DEPTH = 64, 128, 64


@triton.jit
def _gelu(x):
    """The tanh form, as x·σ(2√(2/π)·(x + 0.044715 x³))."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


class Update(NamedTuple):
    """AltUp's: K blocks [rows, n], P [K, K], g [K] and the number of the active block."""

    state: tuple[Tensor, ...]
    P: Tensor
    g: Tensor
    active: int


@triton.jit
def _store_state(outs, state, P, g, active, y, at, mask, K: tl.constexpr):
    x = ()
    of_active = ()
    for j in tl.static_range(K):
        x = x + (tl.load(state[j] + at, mask=mask, other=0.0).to(tl.float32),)
        of_active = of_active + (tl.load(P + active * K + j).to(tl.float32),)
    for i in tl.static_range(K):
        g_i = tl.load(g + i).to(tl.float32)
        block = g_i * y
        for j in tl.static_range(K):
            block += (tl.load(P + i * K + j).to(tl.float32) - g_i * of_active[j]) * x[j]
        tl.store(outs[i] + at, block.to(outs[i].dtype.element_ty), mask=mask)


@triton.jit
def _join_parts(x, tops, sums, k, heads, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """Attention of one row whose keys were split: x is [SPLITS, heads·D], tops and sums are [SPLITS, heads]."""
    head = tl.arange(0, BLOCK_K // D)
    columns = head[:, None] * D + tl.arange(0, D)[None, :]
    mask = head < heads
    top = tl.load(tops + head, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(tops + split * heads + head, mask=mask, other=0.0))
    mixed = tl.zeros([BLOCK_K // D, D], tl.float32)
    total = tl.zeros_like(top)
    for split in tl.static_range(SPLITS):
        share = tl.exp(tl.load(tops + split * heads + head, mask=mask, other=0.0) - top)
        total += share * tl.load(sums + split * heads + head, mask=mask, other=1.0)
        mixed += share[:, None] * tl.load(x + split * k + columns, mask=mask[:, None], other=0.0)
    return tl.reshape(mixed / total[:, None], [BLOCK_K])


@triton.jit(do_not_specialize=["active"])
def vector_kernel(
    out,
    outs,
    state,
    P,
    g,
    active,
    found,
    x,
    tops,
    sums,
    weight,
    norm,
    residual,
    n,
    k,
    heads,
    eps,
    GATED: tl.constexpr,
    CHOOSES: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    program = tl.program_id(0)
    rows = program * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    mask = columns < k
    inside = (rows < n)[:, None] & mask[None, :]
    places = rows.to(tl.int64)[:, None] * k + columns[None, :]
    first = tl.load(weight + places, mask=inside, other=0.0)
    if GATED:
        second = tl.load(weight + places + tl.cast(n, tl.int64) * k, mask=inside, other=0.0)
    if norm is not None:
        scales = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    if SPLITS > 1:
        vector = _join_parts(x, tops, sums, k, heads, SPLITS, D, BLOCK_K)
    else:
        vector = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        vector = vector * tl.rsqrt(tl.sum(vector * vector) / k + eps) * scales
    vector = vector.to(weight.dtype.element_ty).to(tl.float32)
    y = tl.sum(first.to(tl.float32) * vector[None, :], axis=1)
    if GATED:
        y = _gelu(y) * tl.sum(second.to(tl.float32) * vector[None, :], axis=1)
    if CHOOSES:
        y = tl.where(rows < n, y.to(weight.dtype.element_ty).to(tl.float32), LOWEST)
        top = tl.max(y, axis=0)
        tl.store(out + program, top)
        tl.store(found + program, tl.min(tl.where(y == top, rows, NOWHERE), axis=0))
    else:
        if residual is not None:
            y += tl.load(residual + rows, mask=rows < n, other=0.0).to(tl.float32)
        if K > 1:
            _store_state(outs, state, P, g, active, y, rows, rows < n, K)
        else:
            tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < n)


@triton.jit
def rows_kernel(
    out,
    found,
    x,
    weight,
    norm,
    residual,
    batch,
    n,
    k,
    eps,
    GATED: tl.constexpr,
    CHOOSES: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """The norm's scale, one number a row, is multiplied at the end, so that x is read once."""
    program = tl.program_id(0)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    c = program * BLOCK_N + tl.arange(0, BLOCK_N)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    linear = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_B], tl.float32)
    for start in range(0, k, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = (b < batch)[:, None] & (columns < k)[None, :]
        part = tl.load(x + b[:, None] * k + columns[None, :], mask=inside, other=0.0)
        inside = (columns < k)[:, None] & (c < n)[None, :]
        places = c.to(tl.int64)[None, :] * k + columns[:, None]
        first = tl.load(weight + places, mask=inside, other=0.0)
        if norm is not None:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            scales = tl.load(norm + columns, mask=columns < k, other=0.0).to(tl.float32)
            part = wide * scales[None, :]
        part = part.to(weight.dtype.element_ty)
        gate = tl.dot(part, first, gate, input_precision="ieee")
        if GATED:
            second = tl.load(weight + places + tl.cast(n, tl.int64) * k, mask=inside, other=0.0)
            linear = tl.dot(part, second, linear, input_precision="ieee")
    y = gate
    if norm is not None:
        scale = tl.rsqrt(squares / k + eps)[:, None]
        y = y * scale
        linear = linear * scale
    if GATED:
        y = _gelu(y) * linear
    if CHOOSES:
        y = tl.where((c < n)[None, :], y.to(weight.dtype.element_ty).to(tl.float32), LOWEST)
        top = tl.max(y, axis=1)
        place = b * tl.num_programs(0) + program
        tl.store(out + place, top, mask=b < batch)
        tl.store(found + place, tl.min(tl.where(y == top[:, None], c[None, :], NOWHERE), axis=1), mask=b < batch)
    else:
        inside = (b < batch)[:, None] & (c < n)[None, :]
        places = b[:, None] * n + c[None, :]
        if residual is not None:
            y += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + places, y.to(out.dtype.element_ty), mask=inside)


def launch(
    x: Tensor | Parts,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    programmatic: bool,
    chooses: bool = False,
    update: Update | None = None,
) -> tuple[Any, Tensor | None]:
    """y [rows, n]; or, of each row, the largest numbers of tiles of y and where they are, [rows, tiles] each; or,
    of one row, the new blocks, updated with y."""
    parts = x if isinstance(x, Parts) else None
    vector = x.mixed if isinstance(x, Parts) else x.contiguous()
    batch, k = vector.shape[-2:]
    n = weight.shape[0] // (2 if gated else 1)
    block_b = 1
    if batch == 1:
        block_k = triton.next_power_of_2(k)
        block_n = max(1, TILE // block_k) * (4 if n > MANY else 1)
    else:
        most, block_n, depth = (HEAD_ROWS, HEAD_COLUMNS, HEAD_DEPTH) if n > MANY else (ROWS, COLUMNS, DEPTH)
        block_b = min(most, max(16, triton.next_power_of_2(batch)))
        block_k = min(depth, max(16, triton.next_power_of_2(k)))
    tiles = triton.cdiv(n, block_n)
    out = found = outs = state = P = g = None
    if update is not None:
        state = tuple(block.contiguous() for block in update.state)
        outs, P, g = tuple(map(torch.empty_like, state)), update.P.contiguous(), update.g.contiguous()
    elif chooses:
        out = weight.new_empty((batch, tiles), dtype=torch.float32)
        found = weight.new_empty((batch, tiles), dtype=torch.int32)
    else:
        out = weight.new_empty((batch, n), dtype=weight.dtype if residual is None else residual.dtype)
    residual = None if residual is None else residual.contiguous()
    shared = {"GATED": gated, "CHOOSES": chooses, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4}
    shared |= programmed(programmatic)
    with torch.cuda.device_of(weight):
        if batch == 1:
            tops, sums = (parts.tops, parts.sums) if parts is not None else (None, None)
            splits, heads = parts.tops.shape if parts is not None else (1, 1)
            blocks, active = (1, 0) if update is None else (len(update.state), update.active)
            vector_kernel[(tiles,)](
                out, outs, state, P, g, active, found, vector, tops, sums, weight, norm, residual, n, k, heads,
                eps, K=blocks, SPLITS=splits, D=k // heads, **shared,
            )  # fmt: skip
        else:
            rows_kernel[(tiles, triton.cdiv(batch, block_b))](
                out, found, vector, weight, norm, residual, batch, n, k, eps,
                BLOCK_B=block_b, num_stages=3, **shared,
            )  # fmt: skip
    return (out if update is None else outs), found
