"""The backward kernel: a program takes a sequence's head, goes through its keys, and for each few of them through
its queries. It computes the scores once.

The gradients of k and v are in registers while queries pass. That of q is complete when all keys have passed:
until then it is added up in the program's own memory, small enough to stay in the cache. Where a program holds all
keys at once it never leaves the registers. Nothing is added up across programs, so that a result never varies from
run to run: the sums of dS along diagonals are written for each strip of 16 keys of each sequence and head, and the
strips are summed afterwards.
"""

# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.attention.launch import BACKWARD, AttentionCall, TileConfig, strides
from altup.kernels.attention.tiles import (
    LOG2E,
    bias_row,
    bias_tile,
    diagonal_sums,
    from_fragments,
    hide,
    load_numbers,
    load_pairs,
    load_rows,
    load_segments,
    meeting_tiles,
    note_peak,
    random_bits,
    stack,
    store_pairs,
    store_rows,
    to_fragments,
)
from altup.kernels.dropout.triton import stream_keys
from altup.kernels.launch import multiprocessors


def backward(
    problem: AttentionCall, d_out: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, dq: Tensor, dk: Tensor,
    dv: Tensor, peaks: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Writes dq, dk and dv, and their largest numbers to `peaks`; gives the gradient of by_distance if wanted."""
    q, k, v = problem.q, problem.k, problem.v
    config = problem.cut(BACKWARD)
    _, Q, K = problem.sizes
    together = config.keys * config.blocks
    at_once = together >= K
    programs = problem.sequences
    if config.per_sm:
        programs = min(programs, config.per_sm * multiprocessors(q.device))
    beyond, near, edges = _near_tiles(problem, config)
    blocks = triton.cdiv(K, together) * config.blocks
    tiles = triton.cdiv(Q, config.queries)
    sums = None if at_once else lse.new_empty(programs, tiles * config.queries * q.shape[3])
    strips = (
        lse.new_empty(*q.shape[:2], blocks * config.keys // 16, near * config.queries + 32) if bias_grad else None
    )
    backward_kernel[(programs,)](
        *problem.tensors(),
        out,
        lse,
        d_out,
        dq,
        dk,
        dv,
        lse.new_empty(programs, Q, 2),
        sums,
        strips,
        peaks,
        *strides(q, k, v, out, d_out, dq, dk, dv),
        problem.sequences,
        *problem.sizes,
        *problem.numbers(),
        beyond,
        near,
        SLOTS=0 if peaks is None else peaks.numel(),
        BIAS_GRAD=bias_grad,
        EDGES=edges,
        AT_ONCE=at_once,
        ATOMIC=config.atomic,
        LATE=config.late and not at_once,
        BLOCKS=config.blocks,
        **problem.constants(config),
    )
    return None if strips is None else _distance_sums(problem, config, strips)


def _distance_sums(problem: AttentionCall, config: TileConfig, strips: Tensor) -> Tensor:
    """The gradient of by_distance, [H, Q + K − 1]. That of the constant part is at its outermost distance."""
    beyond, near, edges = _near_tiles(problem, config)
    H, Q, K = problem.sizes
    strips = strips.sum(0)
    sums = strips.new_empty(H, Q + K - 1)
    distances_kernel[(H, triton.cdiv(Q + K - 1, 64))](
        strips, sums, strips.shape[1], Q, K, beyond, near,
        BM=config.queries, BN=config.keys, EDGES=edges, STRIPS=32, DISTANCES=64,
    )  # fmt: skip
    return sums


def _near_tiles(problem: AttentionCall, config: TileConfig) -> tuple[int, int, bool]:
    """From which distance on the bias is constant, how many tiles of a block of keys can be nearer than that, and
    whether that leaves any out."""
    _, Q, K = problem.sizes
    tiles = triton.cdiv(Q, config.queries)
    beyond = Q + K if problem.constant_beyond is None else problem.constant_beyond
    near = min(tiles, (2 * beyond + config.keys - 4) // config.queries + 2)
    return beyond, near, near < tiles


@triton.jit
def _first_near(j0, beyond, last, BM: tl.constexpr):
    """The first tile for the keys from j0 on that has a distance below `beyond`."""
    return tl.minimum(tl.maximum(j0 + 1 - beyond, 0) // BM, last)


@triton.jit
def _near(j0, beyond, last, BM: tl.constexpr, BN: tl.constexpr, EDGES: tl.constexpr):
    """The tiles, first and last + 1, for the keys from j0 on that hold distances nearer than `beyond`."""
    if EDGES:
        near = _first_near(j0, beyond, last, BM)
        return near, tl.maximum(tl.minimum(tl.cdiv(beyond + j0 + BN - 1, BM), last), near)
    else:
        return 0, last


@triton.jit
def _repeat(x, N: tl.constexpr):
    """A tuple of N times x."""
    xs = ()
    for _ in tl.static_range(N):
        xs += (x,)  # type: ignore[assignment]
    return xs


@triton.jit(do_not_specialize=["streams", "heads", "drop_below", "beyond", "near_tiles"])
def backward_kernel(
    q, k, v, bias, query_segments, key_segments, seed, out, lse, d_out, dq, dk, dv, pairs, sums, strips, peaks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    d_out_batch, d_out_head, d_out_row, dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row,
    streams, heads, queries, keys, scale, drop_below, keep_scale, beyond, near_tiles,
    SLOTS: tl.constexpr, BIAS_GRAD: tl.constexpr, EDGES: tl.constexpr, AT_ONCE: tl.constexpr, ATOMIC: tl.constexpr,
    LATE: tl.constexpr, BLOCKS: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCKS times BN keys are held at a time, AT_ONCE if these are all. Tiles are keys × queries, so that weights
    and dS are where the products with dO and Q read them.

    A strip holds sums along diagonals, tile after tile from the first near one on, the first being the diagonal
    that starts 16 queries before that tile; and in its last two places what lies beyond the edges, queries before
    and behind."""
    HELD: tl.constexpr = BLOCKS * BN
    LENGTH: tl.constexpr = triton.next_power_of_2(BM + BN)
    G: tl.constexpr = BN // 16
    N: tl.constexpr = BM // 8
    tiles = tl.cdiv(queries, BM)
    distances = queries + keys - 1
    strip_size = near_tiles * BM + 32
    unscale = 1 / scale
    exponent = scale * LOG2E
    pairs += tl.program_id(0).to(tl.int64) * queries * 2
    if not AT_ONCE:
        fragments = tl.arange(0, D // 8)[:, None] * (BM * 8) + tl.arange(0, BM * 8)[None, :]
        sums += tl.program_id(0).to(tl.int64) * tiles * (BM * D)
    for number in range(tl.program_id(0), streams, tl.num_programs(0)):
        stream = tl.full([], number, tl.int64)
        batch = stream // heads
        head = stream % heads
        q_rows = q + batch * q_batch + head * q_head
        k_rows = k + batch * k_batch + head * k_head
        v_rows = v + batch * v_batch + head * v_head
        out_rows = out + batch * out_batch + head * out_head
        do_rows = d_out + batch * d_out_batch + head * d_out_head
        dq_rows = dq + batch * dq_batch + head * dq_head
        dk_rows = dk + batch * dk_batch + head * dk_head
        dv_rows = dv + batch * dv_batch + head * dv_head
        bases = lse + stream * queries
        query_segment = query_segments
        key_segment = key_segments
        if SEGMENTS:
            query_segment += batch * queries
            key_segment += batch * keys
        if BIAS:
            biases = bias + head * distances
        if DROPOUT:
            random = stream_keys(tl.load(seed), stream)
        for tile in range(0, tiles):
            i = tile * BM + tl.arange(0, BM)
            o_block = load_rows(out_rows, i, out_row, queries, D, EVEN)
            do_block = load_rows(do_rows, i, d_out_row, queries, D, EVEN)
            mean = tl.sum(o_block.to(tl.float32) * do_block.to(tl.float32), 1)
            base = load_numbers(bases, i, queries, float("inf"), EVEN)
            store_pairs(pairs, i, queries, base, mean)
            if (SEGMENTS or ATOMIC) and not AT_ONCE:
                tl.store(sums + tile * (BM * D) + fragments, tl.zeros([D // 8, BM * 8], tl.float32))
        tl.debug_barrier()

        for held in range(0, keys, HELD):
            first = 0
            last = tiles
            if CAUSAL:
                first = tl.minimum(held // BM, last - 1)
            own = load_segments(key_segment, held + tl.arange(0, HELD), keys, SEGMENTS)
            first, last = meeting_tiles(own, query_segment, queries, first, last, BM, SEGMENTS)
            k_blocks = ()
            v_blocks = ()
            rows = ()
            for n in tl.static_range(BLOCKS):
                j = held + n * BN + tl.arange(0, BN)
                k_blocks += (load_rows(k_rows, j, k_row, keys, D, EVEN),)  # type: ignore[assignment]
                v_blocks += (load_rows(v_rows, j, v_row, keys, D, EVEN),)  # type: ignore[assignment]
                if BIAS:
                    least = queries + held + n * BN - (first + 1) * BM
                    rows += (bias_row(biases, least, distances, LENGTH),)  # type: ignore[assignment]
            acc_k = _repeat(tl.zeros([BN, D], tl.float32), BLOCKS)
            acc_v = _repeat(tl.zeros([BN, D], tl.float32), BLOCKS)
            if BIAS_GRAD:
                carry = _repeat(tl.zeros([G, 8], tl.float32), BLOCKS)
                next_carry = _repeat(tl.zeros([G, 8], tl.float32), BLOCKS)
                before = _repeat(tl.zeros([BN], tl.float32), BLOCKS)
                behind = _repeat(tl.zeros([BN], tl.float32), BLOCKS)
                own_strips = strips + stream * (tl.cdiv(keys, HELD) * BLOCKS * G) * strip_size
            acc_q = tl.zeros([BM, D], tl.float32)
            places = sums
            if not AT_ONCE:
                places = sums + first * (BM * D) + fragments
            tl.assume(first < last)  # if the loop might be empty, its matrix products would not overlap
            for tile in range(first, last):
                i0 = tile * BM
                i = i0 + tl.arange(0, BM)
                q_block = load_rows(q_rows, i, q_row, queries, D, EVEN)
                do_block = load_rows(do_rows, i, d_out_row, queries, D, EVEN)
                base, mean = load_pairs(pairs, i, queries, EVEN)
                i_segment = load_segments(query_segment, i, queries, SEGMENTS)[None, :]
                if not LATE:
                    acc_q = tl.zeros([BM, D], tl.float32)
                for n in tl.static_range(BLOCKS):
                    j0 = held + n * BN
                    j = j0 + tl.arange(0, BN)
                    if BIAS:
                        x = bias_tile(rows[n] * unscale, BM, BN, True)
                        row = bias_row(biases, queries + j0 - i0 - 2 * BM, distances, LENGTH)  # of the next tile
                        rows = rows[:n] + (row,) + rows[n + 1 :]
                        x = tl.dot(k_blocks[n], tl.trans(q_block), x, input_precision=PRECISION)
                    else:
                        x = tl.dot(k_blocks[n], tl.trans(q_block), input_precision=PRECISION)
                    if LATE and n == 0:  # of the tile before, which was computed beside the sums of diagonals
                        if ATOMIC:
                            done = to_fragments(acc_q, BM, D)
                            tl.atomic_add(places - BM * D, done, mask=tile > first, sem="relaxed")
                        else:
                            tl.store(places - BM * D, to_fragments(acc_q, BM, D), mask=tile > first)
                        acc_q = tl.zeros([BM, D], tl.float32)
                    j_segment = load_segments(key_segment, j, keys, SEGMENTS)[:, None]
                    x = hide(x, i[None, :], j[:, None], i_segment, j_segment, keys, CAUSAL, SEGMENTS, EVEN)
                    p = tl.exp2(x * exponent - base[None, :])
                    dp = tl.dot(v_blocks[n], tl.trans(do_block), input_precision=PRECISION)
                    kept = p
                    if DROPOUT:
                        factor = tl.where(random_bits(random, i0, j0, BM, BN, True) >= drop_below, keep_scale, 0.0)
                        kept = p * factor
                        dp *= factor
                    new_v = tl.dot(kept.to(do_block.dtype), do_block, acc_v[n], input_precision=PRECISION)
                    acc_v = acc_v[:n] + (new_v,) + acc_v[n + 1 :]
                    ds = p * (dp - mean[None, :])
                    rounded = ds.to(q_block.dtype)
                    new_k = tl.dot(rounded, q_block, acc_k[n], input_precision=PRECISION)
                    acc_k = acc_k[:n] + (new_k,) + acc_k[n + 1 :]
                    if n == 0 and not AT_ONCE and not ATOMIC:
                        if SEGMENTS:
                            acc_q = from_fragments(tl.load(places, cache_modifier=".cg"), BM, D)
                        else:
                            acc_q = from_fragments(
                                tl.load(places, mask=held > 0, other=0.0, cache_modifier=".cg"), BM, D
                            )
                    acc_q = tl.dot(tl.trans(rounded), k_blocks[n], acc_q, input_precision=PRECISION)
                    if BIAS_GRAD:
                        near, far = _near(j0, beyond, tiles, BM, BN, EDGES)
                        if EDGES and ((tile < near) | (tile >= far)):
                            beside = tl.sum(ds, 1)
                            new_before = before[n] + tl.where(tile < near, beside, 0.0)
                            new_behind = behind[n] + tl.where(tile < near, 0.0, beside)
                            before = before[:n] + (new_before,) + before[n + 1 :]
                            behind = behind[:n] + (new_behind,) + behind[n + 1 :]
                        else:
                            # The first 16 diagonals end in this tile, the last 16 go on in the next one.
                            found = diagonal_sums(ds, BN, BM)
                            ready = (found[0] + carry[n], found[1] + next_carry[n])
                            strip = (own_strips + (j0 // 16 + tl.arange(0, G)) * strip_size)[:, None, None]
                            strip += tl.arange(0, 8)[None, :, None] + 8 * tl.arange(0, N)[None, None, :]
                            tl.store(strip + (tile - near) * BM, stack(ready + found[2:], G, 0, N))
                            carry = carry[:n] + (found[N],) + carry[n + 1 :]
                            next_carry = next_carry[:n] + (found[N + 1],) + next_carry[n + 1 :]
                if AT_ONCE:
                    store_rows(dq_rows, i, dq_row, queries, acc_q * scale, D)
                    if SLOTS:
                        note_peak(peaks, acc_q * scale, SLOTS)
                elif ATOMIC and not LATE:
                    tl.atomic_add(places, to_fragments(acc_q, BM, D), sem="relaxed")
                elif not LATE:
                    tl.store(places, to_fragments(acc_q, BM, D))
                if not AT_ONCE:
                    places += BM * D
            if LATE and ATOMIC:
                tl.atomic_add(places - BM * D, to_fragments(acc_q, BM, D), sem="relaxed")
            elif LATE:
                tl.store(places - BM * D, to_fragments(acc_q, BM, D))
            for n in tl.static_range(BLOCKS):
                j0 = held + n * BN
                j = j0 + tl.arange(0, BN)
                store_rows(dk_rows, j, dk_row, keys, acc_k[n] * scale, D)
                store_rows(dv_rows, j, dv_row, keys, acc_v[n], D)
                if SLOTS:
                    note_peak(peaks, acc_k[n] * scale, SLOTS)
                    note_peak(peaks, acc_v[n], SLOTS)
                if BIAS_GRAD:
                    near, far = _near(j0, beyond, tiles, BM, BN, EDGES)
                    begin = tl.minimum(tl.maximum(near, first), far)  # the near tiles that were gone through
                    end = tl.maximum(tl.minimum(far, last), begin)
                    strip = own_strips + (j0 // 16 + tl.arange(0, G)) * strip_size
                    ends = strip[:, None] + (end - near) * BM + tl.arange(0, 8)[None, :]
                    tl.store(ends, carry[n])
                    tl.store(ends + 8, next_carry[n])
                    nothing = tl.zeros([G, BM], tl.float32)
                    for tile in range(0, begin - near):
                        tl.store(strip[:, None] + tile * BM + tl.arange(0, BM)[None, :], nothing)
                    for tile in range(end - near, near_tiles):
                        tl.store(strip[:, None] + 16 + tile * BM + tl.arange(0, BM)[None, :], nothing)
                    if EDGES:
                        tl.store(strip + strip_size - 2, tl.sum(tl.reshape(before[n], [G, 16]), 1))
                        tl.store(strip + strip_size - 1, tl.sum(tl.reshape(behind[n], [G, 16]), 1))
            if AT_ONCE and SEGMENTS:
                for tile in range(0, first):
                    store_rows(
                        dq_rows, tile * BM + tl.arange(0, BM), dq_row, queries, tl.zeros([BM, D], tl.float32), D
                    )
                for tile in range(last, tiles):
                    store_rows(
                        dq_rows, tile * BM + tl.arange(0, BM), dq_row, queries, tl.zeros([BM, D], tl.float32), D
                    )
        tl.debug_barrier()
        if not AT_ONCE:
            for tile in range(0, tiles):
                found = tl.load(sums + tile * (BM * D) + fragments, cache_modifier=".cg")
                acc_q = from_fragments(found, BM, D) * scale
                store_rows(dq_rows, tile * BM + tl.arange(0, BM), dq_row, queries, acc_q, D)
                if SLOTS:
                    note_peak(peaks, acc_q, SLOTS)
            tl.debug_barrier()


@triton.jit(do_not_specialize=["count", "queries", "keys", "beyond", "near_tiles"])
def distances_kernel(
    strips, sums, count, queries, keys, beyond, near_tiles,
    BM: tl.constexpr, BN: tl.constexpr, EDGES: tl.constexpr, STRIPS: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """sums[h, j − i + Q − 1] from the `count` strips of head h."""
    head = tl.program_id(0)
    distances = queries + keys - 1
    place = tl.program_id(1) * DISTANCES + tl.arange(0, DISTANCES)
    strip_size = near_tiles * BM + 32
    strips += head * count * strip_size
    total = tl.zeros([DISTANCES], tl.float32)
    for first in range(0, count, STRIPS):
        strip = first + tl.arange(0, STRIPS)
        start = strip * 0
        if EDGES:
            start = _first_near(strip * 16 // BN * BN, beyond, tl.cdiv(queries, BM), BM) * BM
        column = (queries - 1) - place[None, :] + (16 * strip + 16 - start)[:, None]
        inside = (strip[:, None] < count) & (column >= 0) & (column < near_tiles * BM + 16)
        total += tl.sum(tl.load(strips + strip[:, None] * strip_size + column, mask=inside, other=0.0), 0)
        if EDGES:
            ends = strips + (strip + 1) * strip_size
            before = tl.sum(tl.load(ends - 2, mask=strip < count, other=0.0), 0)
            behind = tl.sum(tl.load(ends - 1, mask=strip < count, other=0.0), 0)
            total += tl.where(place == 0, behind, 0.0) + tl.where(place == distances - 1, before, 0.0)
    tl.store(sums + head * distances + place, total, mask=place < distances)
