"""The backward kernel that passes over the keys for a block of queries: the gradients of q and of the bias.

Nothing is added up across programs, so that a result never varies from run to run: the sums of dS along diagonals
are written for each strip of 16 queries of each sequence and head, and the strips are summed afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.attention.kept import keep, kept_bits, kept_words, words_of
from altup.kernels.attention.launch import QUERIES, AttentionCall, TileConfig, descriptors, strides
from altup.kernels.attention.tiles import (
    LOG2E,
    bias_row,
    bias_tile,
    diagonal_sums,
    hide,
    load_numbers,
    load_rows,
    load_segments,
    load_tile,
    meeting_tiles,
    note_peak,
    random_bits,
    stack,
    store_pairs,
    store_rows,
)
from altup.kernels.dropout.triton import stream_keys


def queries_backward(
    problem: AttentionCall, d_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, dq: Tensor,
    peaks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Writes dq, and its largest numbers to `peaks`; gives the strips, and what the other kernel reads: of each
    row the logarithm and the sum of d_out ∘ out."""
    q = problem.q
    config = problem.cut(QUERIES)
    blocks = triton.cdiv(q.shape[2], config.queries)
    beyond, near, edges = _near_tiles(problem, config)
    pairs = lse.new_empty(*lse.shape, 2)
    strips = None
    if bias_grad:
        strips = lse.new_empty(*q.shape[:2], blocks * config.queries // 16, near * config.keys + 32)
    queries_kernel[(blocks * problem.sequences,)](
        *descriptors(config, config.keys, problem.k, problem.v),
        *problem.tensors(),
        out,
        lse,
        d_out,
        dq,
        pairs,
        strips,
        peaks,
        *strides(q, problem.k, problem.v, out, d_out, dq),
        *problem.sizes,
        *problem.numbers(),
        beyond,
        near,
        SLOTS=0 if peaks is None else peaks.numel(),
        BIAS_GRAD=bias_grad,
        EDGES=edges,
        **problem.constants(config),
    )
    return pairs, strips


def distance_sums(problem: AttentionCall, strips: Tensor, sums: Tensor) -> None:
    """Writes the gradient of by_distance, [H, Q + K − 1]; that of the constant part at its outermost distance."""
    config = problem.cut(QUERIES)
    beyond, near, edges = _near_tiles(problem, config)
    H, Q, K = problem.sizes
    strips = strips.sum(0)
    distances_kernel[(H, triton.cdiv(Q + K - 1, 64))](
        strips, sums, strips.shape[1], Q, K, beyond, near,
        BM=config.queries, BN=config.keys, EDGES=edges, STRIPS=32, DISTANCES=64,
    )  # fmt: skip


def _near_tiles(problem: AttentionCall, config: TileConfig) -> tuple[int, int, bool]:
    """From which distance on the bias is constant, how many tiles of a block of queries can be nearer than that,
    and whether there are tiles beyond them."""
    _, Q, K = problem.sizes
    tiles = triton.cdiv(K, config.keys)
    beyond = Q + K if problem.constant_beyond is None else problem.constant_beyond
    near = min(tiles, (2 * beyond + config.queries - 4) // config.keys + 2)
    return beyond, near, near < tiles


@triton.jit
def _first_near(i0, beyond, last, BN: tl.constexpr):
    """The first tile for the queries from i0 on that has a distance above −beyond."""
    return tl.minimum(tl.maximum(i0 + 1 - beyond, 0) // BN, last)


@triton.jit(do_not_specialize=["heads", "drop_below", "beyond", "near_tiles"])
def queries_kernel(
    k_tiles, v_tiles, q, k, v, bias, query_segments, key_segments, seed, out, lse, d_out, dq, pairs, strips, peaks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    d_out_batch, d_out_head, d_out_row, dq_batch, dq_head, dq_row,
    heads, queries, keys, scale, drop_below, keep_scale, beyond, near_tiles,
    SLOTS: tl.constexpr, BIAS_GRAD: tl.constexpr, EDGES: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
    BITS: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip holds sums along diagonals, tile after tile from the first near one on, the first being the diagonal
    that starts 16 keys before that tile; and in its last two numbers what lies beyond its left and right edges."""
    blocks = tl.cdiv(queries, BM)
    stream = tl.program_id(0) // blocks
    i0 = tl.program_id(0) % blocks * BM
    sequence = stream // heads
    batch = sequence.to(tl.int64)
    head = stream % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    out += batch * out_batch + head * out_head
    d_out += batch * d_out_batch + head * d_out_head
    dq += batch * dq_batch + head * dq_head
    lse += stream.to(tl.int64) * queries
    pairs += stream.to(tl.int64) * queries * 2
    i = i0 + tl.arange(0, BM)
    q_block = load_rows(q, i, q_row, queries, D, EVEN)
    do_block = load_rows(d_out, i, d_out_row, queries, D, EVEN)
    o_block = load_rows(out, i, out_row, queries, D, EVEN)
    base = load_numbers(lse, i, queries, float("inf"), EVEN)
    mean = tl.sum(o_block.to(tl.float32) * do_block.to(tl.float32), 1)
    store_pairs(pairs, i, queries, base, mean)
    last = tl.cdiv(keys, BN)
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(i0 + BM, BN))
    LENGTH: tl.constexpr = triton.next_power_of_2(BM + BN)
    distances = queries + keys - 1
    if SEGMENTS:
        query_segments += batch * queries
        key_segments += batch * keys
    i_segment = load_segments(query_segments, i, queries, SEGMENTS)
    if SHARED:
        seed += stream.to(tl.int64) * keys
    elif DROPOUT and not BITS:
        random = stream_keys(tl.load(seed), stream)
    unscale = 1 / scale
    exponent = scale * LOG2E

    G: tl.constexpr = BM // 16
    N: tl.constexpr = BN // 8
    near = 0
    far = last
    if EDGES:
        near = _first_near(i0, beyond, last, BN)
        far = tl.maximum(tl.minimum(tl.cdiv(beyond + i0 + BM - 1, BN), last), near)
    first, last = meeting_tiles(i_segment, key_segments, keys, 0, last, BN, SEGMENTS)
    begin = near  # the near tiles that are gone through
    end = far
    if SEGMENTS:
        begin = tl.minimum(tl.maximum(near, first), far)
        end = tl.maximum(tl.minimum(far, last), begin)
    if BIAS:
        bias += head * distances
        row = bias_row(bias, queries - i0 - BM + first * BN, distances, LENGTH)
    if BITS:
        seed += stream.to(tl.int64) * words_of(queries, keys)
        words = kept_words(seed, i0, first * BN, queries, keys, BM)
    if BIAS_GRAD:
        strip_size = near_tiles * BN + 32
        strips += (stream.to(tl.int64) * (blocks * G) + i0 // 16 + tl.arange(0, G)) * strip_size
        offsets = strips[:, None, None] + tl.arange(0, 8)[None, :, None] + 8 * tl.arange(0, N)[None, None, :]
        offsets += (begin - near) * BN
        carry = tl.zeros([G, 8], tl.float32)
        next_carry = tl.zeros([G, 8], tl.float32)
        left = tl.zeros([BM], tl.float32)
        right = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    tl.assume(first < last)  # if the loop might be empty, its matrix products would not overlap
    for tile in range(first, last):
        j0 = tile * BN
        j = j0 + tl.arange(0, BN)
        k_block = load_tile(k, k_tiles, sequence, head, j0, k_row, keys, BN, D, EVEN)
        v_block = load_tile(v, v_tiles, sequence, head, j0, v_row, keys, BN, D, EVEN)
        if BITS:
            bits = kept_bits(words, i0, j0, BM, BN, False)
            words = kept_words(seed, i0, j0 + BN, queries, keys, BM)  # prefetch the next tile's
        if BIAS:
            x = bias_tile(row * unscale, BM, BN, False)
            row = bias_row(bias, queries - i0 - BM + j0 + BN, distances, LENGTH)  # prefetch the next tile
            x = tl.dot(q_block, tl.trans(k_block), x, input_precision=PRECISION)
        else:
            x = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
        j_segment = load_segments(key_segments, j, keys, SEGMENTS)[None, :]
        x = hide(x, i[:, None], j[None, :], i_segment[:, None], j_segment, keys, CAUSAL, SEGMENTS, EVEN)
        p = tl.exp2(x * exponent - base[:, None])
        dp = tl.dot(do_block, tl.trans(v_block), input_precision=PRECISION)
        if DROPOUT:
            if BITS:
                dp = keep(dp, bits) * keep_scale
            elif SHARED:
                dp *= (load_numbers(seed, j, keys, 0.0, EVEN) * keep_scale)[None, :]
            else:
                kept = random_bits(random, i0, j0, BM, BN, False) >= drop_below
                dp = tl.where(kept, dp, 0.0) * keep_scale
        ds = p * (dp - mean[:, None])
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision=PRECISION)
        if BIAS_GRAD:
            if EDGES and ((tile < near) | (tile >= far)):
                beside = tl.sum(ds, 1)
                left += tl.where(tile < near, beside, 0.0)
                right += tl.where(tile < near, 0.0, beside)
            else:
                # The first 16 diagonals end in this tile, the last 16 go on in the next one.
                sums = diagonal_sums(ds, BM, BN)
                ready = (sums[0] + carry, sums[1] + next_carry)
                tl.store(offsets, stack(ready + sums[2:], G, 0, N))
                offsets += BN
                carry = sums[N]
                next_carry = sums[N + 1]
    store_rows(dq, i, dq_row, queries, acc * scale, D)
    if SLOTS:
        note_peak(peaks, acc * scale, SLOTS)
    if BIAS_GRAD:
        ends = strips[:, None] + (end - near) * BN + tl.arange(0, 8)[None, :]
        tl.store(ends, carry)
        tl.store(ends + 8, next_carry)
        if SEGMENTS:
            for tile in range(0, begin - near):
                before = strips[:, None] + tile * BN + tl.arange(0, BN)[None, :]
                tl.store(before, tl.zeros([G, BN], tl.float32))
        for tile in range(end - near, near_tiles):
            rest = strips[:, None] + 16 + tile * BN + tl.arange(0, BN)[None, :]
            tl.store(rest, tl.zeros([G, BN], tl.float32))
        if EDGES:
            tl.store(strips + strip_size - 2, tl.sum(tl.reshape(left, [G, 16]), 1))
            tl.store(strips + strip_size - 1, tl.sum(tl.reshape(right, [G, 16]), 1))


@triton.jit(do_not_specialize=["count", "queries", "keys", "beyond", "near_tiles"])
def distances_kernel(
    strips, sums, count, queries, keys, beyond, near_tiles,
    BM: tl.constexpr, BN: tl.constexpr, EDGES: tl.constexpr, STRIPS: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """sums[h, j − i + Q − 1] from the `count` strips of head h."""
    head = tl.program_id(0)
    distances = queries + keys - 1
    offset = tl.program_id(1) * DISTANCES + tl.arange(0, DISTANCES)
    strip_size = near_tiles * BN + 32
    strips += head * count * strip_size
    total = tl.zeros([DISTANCES], tl.float32)
    for first in range(0, count, STRIPS):
        strip = first + tl.arange(0, STRIPS)
        start = strip * 0
        if EDGES:
            start = _first_near(strip * 16 // BM * BM, beyond, tl.cdiv(keys, BN), BN) * BN
        column = offset[None, :] - (queries - 1) + (16 * strip + 16 - start)[:, None]
        inside = (strip[:, None] < count) & (column >= 0) & (column < near_tiles * BN + 16)
        total += tl.sum(tl.load(strips + strip[:, None] * strip_size + column, mask=inside, other=0.0), 0)
        if EDGES:
            ends = strips + (strip + 1) * strip_size
            left = tl.sum(tl.load(ends - 2, mask=strip < count, other=0.0), 0)
            right = tl.sum(tl.load(ends - 1, mask=strip < count, other=0.0), 0)
            total += tl.where(offset == 0, left, 0.0) + tl.where(offset == distances - 1, right, 0.0)
    tl.store(sums + head * distances + offset, total, mask=offset < distances)
