"""The forward kernel: a program holds a block of queries and passes once over the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.attention.kept import keep, kept_bits, kept_words, words_of
from altup.kernels.attention.launch import FORWARD, AttentionCall, descriptors, strides
from altup.kernels.attention.tiles import (
    LOG2E,
    bias_row,
    bias_tile,
    hide,
    load_numbers,
    load_rows,
    load_segments,
    load_tile,
    meeting_tiles,
    random_bits,
    store_rows,
)
from altup.kernels.dropout.triton import stream_keys


def forward(problem: AttentionCall, out: Tensor, lse: Tensor) -> None:
    """Writes the result, and the base-2 logarithm of each row's sum of exponents [B, H, Q]: ∞ where no key is
    seen."""
    q = problem.q
    config = problem.cut(FORWARD)
    forward_kernel[(triton.cdiv(q.shape[2], config.queries) * problem.sequences,)](
        *descriptors(config, config.keys, problem.k, problem.v),
        *problem.tensors(),
        out,
        lse,
        *strides(q, problem.k, problem.v, out),
        *problem.sizes,
        *problem.numbers(),
        **problem.constants(config),
    )


@triton.jit(do_not_specialize=["heads", "drop_below"])
def forward_kernel(
    k_tiles, v_tiles, q, k, v, bias, query_segments, key_segments, seed, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    heads, queries, keys, scale, drop_below, keep_scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores are kept in units of `scale`, so that the bias can be what the product of q and k is added to."""
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
    i = i0 + tl.arange(0, BM)
    q_block = load_rows(q, i, q_row, queries, D, EVEN)
    last = tl.cdiv(keys, BN)
    if CAUSAL:
        last = tl.minimum(last, tl.cdiv(i0 + BM, BN))
    LENGTH: tl.constexpr = triton.next_power_of_2(BM + BN)
    distances = queries + keys - 1
    if SEGMENTS:
        query_segments += batch * queries
        key_segments += batch * keys
    i_segment = load_segments(query_segments, i, queries, SEGMENTS)
    first, last = meeting_tiles(i_segment, key_segments, keys, 0, last, BN, SEGMENTS)
    if BIAS:
        bias += head * distances
        row = bias_row(bias, queries - i0 - BM + first * BN, distances, LENGTH)
    if BITS:
        seed += stream.to(tl.int64) * words_of(queries, keys)
        words = kept_words(seed, i0, first * BN, queries, keys, BM)
    elif SHARED:
        seed += stream.to(tl.int64) * keys
    elif DROPOUT:
        random = stream_keys(tl.load(seed), stream)
    unscale = 1 / scale
    exponent = scale * LOG2E

    acc = tl.zeros([BM, D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
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
        new_top = tl.maximum(top, tl.max(x, 1))
        shift = new_top
        if SEGMENTS:  # a row that has seen no key yet
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(x * exponent - (shift * exponent)[:, None])
        fade = tl.exp2((top - shift) * exponent)
        total = total * fade + tl.sum(p, 1)
        if DROPOUT:
            if BITS:
                p = keep(p, bits)
            elif SHARED:
                p *= load_numbers(seed, j, keys, 0.0, EVEN)[None, :]
            else:
                p = tl.where(random_bits(random, i0, j0, BM, BN, False) >= drop_below, p, 0.0)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * fade[:, None], input_precision=PRECISION)
        top = new_top

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    share = 1 / total
    if DROPOUT:
        share *= keep_scale
    store_rows(out, i, out_row, queries, acc * share[:, None], D)
    base = tl.where(empty, float("inf"), top * exponent + tl.log2(total))
    tl.store(lse + stream.to(tl.int64) * queries + i, base, mask=i < queries)
