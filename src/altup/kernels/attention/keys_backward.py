"""The backward kernel that passes over the queries for a block of keys: the gradients of k and v."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.attention.kept import keep, kept_bits, kept_words, words_of
from altup.kernels.attention.launch import AttentionCall, descriptors, strides
from altup.kernels.attention.tiles import (
    LOG2E,
    bias_row,
    bias_tile,
    hide,
    load_numbers,
    load_pairs,
    load_rows,
    load_segments,
    load_tile,
    meeting_tiles,
    note_peak,
    random_bits,
    store_rows,
)
from altup.kernels.dropout.triton import stream_keys


def keys_backward(
    problem: AttentionCall, d_out: Tensor, pairs: Tensor, dk: Tensor, dv: Tensor,
    peaks: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dk and dv, and their largest numbers to `peaks`."""
    q, k, v = problem.q, problem.k, problem.v
    config = problem.cut(problem.key_tiles)
    keys_kernel[(triton.cdiv(k.shape[2], config.keys) * problem.sequences,)](
        *descriptors(config, config.queries, q, d_out),
        *problem.tensors(),
        pairs,
        d_out,
        dk,
        dv,
        peaks,
        *strides(q, k, v, d_out, dk, dv),
        *problem.sizes,
        *problem.numbers(),
        SLOTS=0 if peaks is None else peaks.numel(),
        **problem.constants(config),
    )


@triton.jit(do_not_specialize=["heads", "drop_below"])
def keys_kernel(
    q_tiles, do_tiles, q, k, v, bias, query_segments, key_segments, seed, pairs, d_out, dk, dv, peaks,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    d_out_batch, d_out_head, d_out_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, queries, keys, scale, drop_below, keep_scale,
    SLOTS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles are keys × queries, so that weights and dS are where the products with dO and Q read them."""
    blocks = tl.cdiv(keys, BN)
    stream = tl.program_id(0) // blocks
    j0 = tl.program_id(0) % blocks * BN
    sequence = stream // heads
    batch = sequence.to(tl.int64)
    head = stream % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    d_out += batch * d_out_batch + head * d_out_head
    dk += batch * dk_batch + head * dk_head
    dv += batch * dv_batch + head * dv_head
    pairs += stream.to(tl.int64) * queries * 2
    j = j0 + tl.arange(0, BN)
    k_block = load_rows(k, j, k_row, keys, D, EVEN)
    v_block = load_rows(v, j, v_row, keys, D, EVEN)
    first = 0
    last = tl.cdiv(queries, BM)
    if CAUSAL:
        first = tl.minimum(j0 // BM, last - 1)
    LENGTH: tl.constexpr = triton.next_power_of_2(BM + BN)
    distances = queries + keys - 1
    if SEGMENTS:
        query_segments += batch * queries
        key_segments += batch * keys
    j_segment = load_segments(key_segments, j, keys, SEGMENTS)
    first, last = meeting_tiles(j_segment, query_segments, queries, first, last, BM, SEGMENTS)
    if BIAS:
        bias += head * distances
        row = bias_row(bias, queries + j0 - (first + 1) * BM, distances, LENGTH)
    if BITS:
        seed += stream.to(tl.int64) * words_of(queries, keys)
        words = kept_words(seed, first * BM, j0, queries, keys, BM)
    elif SHARED:
        factors = load_numbers(seed + stream.to(tl.int64) * keys, j, keys, 0.0, EVEN)[:, None] * keep_scale
    elif DROPOUT:
        random = stream_keys(tl.load(seed), stream)
    unscale = 1 / scale
    exponent = scale * LOG2E

    acc_k = tl.zeros([BN, D], tl.float32)
    acc_v = tl.zeros([BN, D], tl.float32)
    tl.assume(first < last)  # if the loop might be empty, its matrix products would not overlap
    for tile in range(first, last):
        i0 = tile * BM
        i = i0 + tl.arange(0, BM)
        q_block = load_tile(q, q_tiles, sequence, head, i0, q_row, queries, BM, D, EVEN)
        do_block = load_tile(d_out, do_tiles, sequence, head, i0, d_out_row, queries, BM, D, EVEN)
        base, mean = load_pairs(pairs, i, queries, EVEN)
        if BITS:
            bits = kept_bits(words, i0, j0, BM, BN, True)
            words = kept_words(seed, i0 + BM, j0, queries, keys, BM)  # prefetch the next tile's
        if BIAS:
            x = bias_tile(row * unscale, BM, BN, True)
            row = bias_row(bias, queries + j0 - i0 - 2 * BM, distances, LENGTH)  # prefetch the next tile
            x = tl.dot(k_block, tl.trans(q_block), x, input_precision=PRECISION)
        else:
            x = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
        i_segment = load_segments(query_segments, i, queries, SEGMENTS)[None, :]
        x = hide(x, i[None, :], j[:, None], i_segment, j_segment[:, None], keys, CAUSAL, SEGMENTS, EVEN)
        p = tl.exp2(x * exponent - base[None, :])
        dp = tl.dot(v_block, tl.trans(do_block), input_precision=PRECISION)
        weights = p
        if SHARED:
            dp *= factors
        elif DROPOUT:
            if BITS:
                weights = keep(p, bits)
            else:
                weights = tl.where(random_bits(random, i0, j0, BM, BN, True) >= drop_below, p, 0.0)
            mean *= 1 / keep_scale
        acc_v = tl.dot(weights.to(do_block.dtype), do_block, acc_v, input_precision=PRECISION)
        # With decisions by pair, dS / keep_scale: so each is used once.
        ds = weights * dp - p * mean[None, :] if DROPOUT and not SHARED else p * (dp - mean[None, :])
        acc_k = tl.dot(ds.to(q_block.dtype), q_block, acc_k, input_precision=PRECISION)
    if SHARED:
        acc_v *= factors
    elif DROPOUT:
        acc_k *= keep_scale
        acc_v *= keep_scale
    store_rows(dk, j, dk_row, keys, acc_k * scale, D)
    store_rows(dv, j, dv_row, keys, acc_v, D)
    if SLOTS:
        note_peak(peaks, acc_k * scale, SLOTS)
        note_peak(peaks, acc_v, SLOTS)
