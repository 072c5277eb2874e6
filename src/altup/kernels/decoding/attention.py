"""Triton kernels of attention for one query of each row: over a cache that grows by that token, and over a memory.

A program takes a row and a head, or a part of its keys. Each of its BLOCK slots goes through every BLOCK-th key
with a softmax of its own, so that threads need one another at the end only:

    m' = max(m, s),    l' = l·e^(m − m') + e^(s − m'),    a' = a·e^(m − m') + e^(s − m')·v
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
BLOCK = 64  # keys that a program reads at once
PROGRAMS = 96  # where there are fewer rows and heads, keys are split
# Of more rows than one, over the memory: keys at once, and the iterations whose keys are on their way together.
# 64 rows read 3.6 TB/s that way on an H200; 64 keys at once, none loaded ahead, 3.1.
MEMORY_BLOCK, STAGES = 32, 3
FETCHED = 128  # lines of a cache's keys, and of its values, that are fetched before the query is there
LINE = tl.constexpr(128)  # bytes


class Parts(NamedTuple):
    """Attention of one row over parts of its keys: Σ e^(s − top)·v [splits, 1, heads·d], the largest scores `tops`
    and the sums Σ e^(s − top), [splits, heads] each, all float32."""

    mixed: Tensor
    tops: Tensor
    sums: Tensor


@triton.jit
def _fetch(x, last, LINES: tl.constexpr):
    """The first lines of x, as far as the element `last`, on their way to the L2 cache: nobody waits for them."""
    of_line: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
    lines = (x + tl.minimum(tl.arange(0, LINES) * of_line, last)).to(tl.uint64)
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [lines], tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of_parts(x, stride, mask, SPLITS: tl.constexpr):
    """Σ x + i·stride over SPLITS parts of a product, in float32."""
    total = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SPLITS):
        total += tl.load(x + i * stride, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _absorb(m, total, mixed, scores, valid, values):
    top = tl.maximum(m, scores)
    share = tl.exp(m - top)
    weight = tl.where(valid, tl.exp(scores - top), 0.0)
    return top, total * share + weight, mixed * share[:, None] + weight[:, None] * values


@triton.jit
def _join_slots(m, total, mixed):
    top = tl.max(m, axis=0)
    share = tl.exp(m - top)
    return top, tl.sum(share * total, axis=0), tl.sum(share[:, None] * mixed, axis=0)


@triton.jit
def cache_kernel(
    out,
    qkv,
    keys,
    values,
    place,
    bias,
    heads,
    places,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    FETCHED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """The new key and value are written to `place` of the cache, and attended to from registers. `place` and what
    is in the cache are of earlier steps, so they are read and fetched before the new ones are there. All three of
    qkv [PARTS, rows, 3·heads·D] are sums."""
    row, head = tl.program_id(0), tl.program_id(1)
    lanes, slots = tl.arange(0, D), tl.arange(0, BLOCK)
    now = tl.load(place + row).to(tl.int32)
    of_row = (row * heads + head).to(tl.int64) * places * D
    if PROGRAMMATIC:
        gdc_launch_dependents()
        if FETCHED > 0:
            _fetch(keys + of_row, now * D, FETCHED)
            _fetch(values + of_row, now * D, FETCHED)
        gdc_wait()
    start = qkv + row.to(tl.int64) * 3 * heads * D + head * D + lanes
    stride, inside = tl.num_programs(0) * 3 * heads * D, lanes < D
    q = sum_of_parts(start, stride, inside, PARTS).to(keys.dtype.element_ty)
    k = sum_of_parts(start + heads * D, stride, inside, PARTS).to(keys.dtype.element_ty)
    v = sum_of_parts(start + 2 * heads * D, stride, inside, PARTS).to(keys.dtype.element_ty)
    tl.store(keys + of_row + now * D + lanes, k)
    tl.store(values + of_row + now * D + lanes, v)
    wide = q.to(tl.float32)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, D], tl.float32)
    for first in range(0, now, BLOCK):
        token = first + slots
        valid = token < now
        at = of_row + token[:, None] * D + lanes[None, :]
        some_keys = tl.load(keys + at, mask=valid[:, None], other=0.0).to(tl.float32)
        some_values = tl.load(values + at, mask=valid[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(some_keys * wide[None, :], axis=1)
        scores += tl.load(bias + head * places + now - token, mask=valid, other=0.0)
        m, total, mixed = _absorb(m, total, mixed, tl.where(valid, scores, LOWEST), valid, some_values)
    top, all, a = _join_slots(m, total, mixed)
    score = tl.sum(wide * k.to(tl.float32), axis=0) + tl.load(bias + head * places)
    higher = tl.maximum(top, score)
    before, new = tl.exp(top - higher), tl.exp(score - higher)
    a = (a * before + new * v.to(tl.float32)) / (all * before + new)
    tl.store(out + (row * heads + head).to(tl.int64) * D + lanes, a.to(out.dtype.element_ty))


@triton.jit
def _attend(m, total, mixed, q, keys, values, added, row, token, tokens, valid):
    scores = tl.sum(keys.to(tl.float32) * q[None, :], axis=1)
    if added is not None:
        scores += tl.load(added + row.to(tl.int64) * tokens + token, mask=valid, other=0.0).to(tl.float32)
    return _absorb(m, total, mixed, tl.where(valid, scores, LOWEST), valid, values.to(tl.float32))


@triton.jit
def memory_kernel(
    out,
    tops,
    sums,
    q,
    keys,
    values,
    added,
    heads,
    tokens,
    span,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """`SINGLE`: a program has no more than BLOCK keys, which it reads before it waits for the query, the sum of
    q [PARTS, rows, heads·D]."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lanes, slots = tl.arange(0, D), tl.arange(0, BLOCK)
    unit = row * heads + head
    of_row = unit.to(tl.int64) * tokens * D
    end = tl.minimum((split + 1) * span, tokens)
    token = split * span + slots
    valid = token < end
    if SINGLE:
        at = of_row + token[:, None] * D + lanes[None, :]
        some_keys = tl.load(keys + at, mask=valid[:, None], other=0.0)
        some_values = tl.load(values + at, mask=valid[:, None], other=0.0)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    stride = tl.num_programs(0) * heads * D
    wide = sum_of_parts(q + unit.to(tl.int64) * D + lanes, stride, lanes < D, PARTS)
    wide = wide.to(keys.dtype.element_ty).to(tl.float32)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, D], tl.float32)
    if SINGLE:
        m, total, mixed = _attend(m, total, mixed, wide, some_keys, some_values, added, row, token, tokens, valid)
    else:
        for first in tl.range(split * span, end, BLOCK, num_stages=STAGES):
            token = first + slots
            valid = token < end
            at = of_row + token[:, None] * D + lanes[None, :]
            some_keys = tl.load(keys + at, mask=valid[:, None], other=0.0)
            some_values = tl.load(values + at, mask=valid[:, None], other=0.0)
            m, total, mixed = _attend(
                m, total, mixed, wide, some_keys, some_values, added, row, token, tokens, valid
            )
    top, all, a = _join_slots(m, total, mixed)
    if SPLIT:
        tl.store(out + (split * heads + head) * D + lanes, a)
        tl.store(tops + split * heads + head, top)
        tl.store(sums + split * heads + head, all)
    else:
        tl.store(out + unit.to(tl.int64) * D + lanes, (a / all).to(out.dtype.element_ty))


def over_cache(
    qkv: Tensor, keys: Tensor, values: Tensor, place: Tensor, bias: Tensor, programmatic: bool
) -> Tensor:
    rows, heads, places, d = keys.shape
    parts = 1 if qkv.dim() == 2 else len(qkv)
    out = keys.new_empty(rows, heads * d)
    with torch.cuda.device_of(qkv):
        cache_kernel[(rows, heads)](
            out,
            qkv,
            keys,
            values,
            place,
            bias,
            heads,
            places,
            D=d,
            BLOCK=BLOCK,
            PARTS=parts,
            FETCHED=FETCHED,
            num_warps=4,
            **programmed(programmatic),
        )
    return out


def over_memory(
    q: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, programmatic: bool
) -> Tensor | Parts:
    rows, heads, tokens, d = keys.shape
    block, stages = (BLOCK, 1) if rows == 1 else (MEMORY_BLOCK, STAGES)
    splits = 1 if rows > 1 else max(1, min(PROGRAMS // heads, triton.cdiv(tokens, block)))
    span = triton.cdiv(triton.cdiv(tokens, splits), block) * block
    parts = 1 if q.dim() == 2 else len(q)
    splits = triton.cdiv(tokens, span)
    tops = sums = None
    if splits > 1:
        out = q.new_empty(splits, rows, heads * d, dtype=torch.float32)
        tops, sums = (q.new_empty(splits, heads, dtype=torch.float32) for _ in range(2))
    else:
        out = keys.new_empty(rows, heads * d)
    with torch.cuda.device_of(q):
        memory_kernel[(rows, heads, splits)](
            out, tops, sums, q, keys, values, added, heads, tokens, span,
            D=d, BLOCK=block, SPLIT=splits > 1, SINGLE=span <= block, STAGES=stages, PARTS=parts,
            num_warps=4, **programmed(programmatic),
        )  # fmt: skip
    return out if tops is None or sums is None else Parts(out, tops, sums)


def programmed(programmatic: bool) -> dict[str, bool]:
    """What makes a kernel begin before the one before it has ended."""
    return {"PROGRAMMATIC": True, "launch_pdl": True} if programmatic else {"PROGRAMMATIC": False}
