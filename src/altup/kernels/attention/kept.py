"""Dropout's decisions as bits, drawn once for all three kernels of attention; `reference.py` defines them.

A word holds the decisions of 32 pairs of a query and a key, those that a thread of a tile has in its registers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.attention import reference
from altup.kernels.attention.tiles import side_by_side
from altup.kernels.dropout.reference import dropped
from altup.kernels.dropout.triton import stream_keys, stream_words
from altup.kernels.launch import interprets_triton
from altup.kernels.operators import operator

SQUARE = tl.constexpr(reference.SQUARE)
WORDS = tl.constexpr(reference.WORDS)
DRAWS = tl.constexpr(reference.DRAWS)
BLOCK = 1024  # words of a program
# The GPU's own instructions, which the interpreter does not know.
NATIVE = tl.constexpr(not interprets_triton())


@operator("altup::attention_keep_bits")
def keep_bits_op(seed: Tensor, streams: int, queries: int, keys: int, dropout: float) -> Iterator[Tensor]:
    """Which weights dropout keeps under `seed` [1], int64, as bits (`keep_bits_reference`)."""
    squares = -(-queries // reference.SQUARE) * -(-keys // reference.SQUARE)
    kept = seed.new_empty(streams, squares, reference.WORDS, dtype=torch.int32)
    yield kept
    words = kept[0].numel()
    keep_bits_kernel[(triton.cdiv(words, BLOCK) * kept.shape[0],)](
        kept, seed, words, triton.cdiv(keys, reference.SQUARE), dropped(dropout), BLOCK=BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize=["dropped"])
def keep_bits_kernel(kept, seed, words, key_squares, dropped, BLOCK: tl.constexpr):
    """Compares 32 random numbers with a threshold at once: DRAWS words hold one bit of each number. From the
    lowest bit on, a number is less if its bit is 0 where the threshold's is 1, and remains what it was where both
    agree: the majority of three bits, of which the number's is drawn the other way round."""
    blocks = tl.cdiv(words, BLOCK)
    stream = tl.program_id(0) // blocks
    word = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    square = word // WORDS
    c0 = square // key_squares * WORDS + word % WORDS
    c1 = square % key_squares * (DRAWS // 2)
    keys = stream_keys(tl.load(seed), stream)
    less = tl.zeros([BLOCK], tl.uint32)
    for n in tl.static_range(DRAWS // 2):
        a, b = stream_words(keys, c0, c1 + n)
        less = _majority(less, a, dropped, 2 * n)
        less = _majority(less, b, dropped, 2 * n + 1)
    offset = kept + stream.to(tl.int64) * words + word
    tl.store(offset, ~less.to(tl.int32, bitcast=True), mask=word < words)


@triton.jit
def _majority(less, drawn, dropped, n: tl.constexpr):
    threshold = (0 - (dropped >> n & 1)).to(tl.uint32)
    return (less & drawn) | (threshold & (less | drawn))


@triton.jit
def words_of(queries, keys):
    """Words of a stream."""
    return tl.cdiv(queries, SQUARE) * tl.cdiv(keys, SQUARE) * WORDS


@triton.jit
def kept_words(kept, i0, j0, queries, keys, QUERIES: tl.constexpr):
    """A stream's words for the tile at (i0, j0), those of the squares in which it lies."""
    SQUARES: tl.constexpr = QUERIES // SQUARE if QUERIES > SQUARE else 1
    offset = tl.arange(0, SQUARES * WORDS)
    across = i0 // SQUARE + offset // WORDS
    square = across * tl.cdiv(keys, SQUARE) + j0 // SQUARE
    inside = (across * SQUARE < queries) & (j0 < keys)
    return tl.load(kept + square * WORDS + offset % WORDS, mask=inside, other=0)


@triton.jit
def kept_bits(words, i0, j0, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Not 0 where a weight of a tile is kept.

    Which word and which bit are put together from 8 × 8 squares, as `bias_tile` does: the compiler sees which of a
    thread's words are equal, reads each once, and tests bits by constants."""
    tl.static_assert(KEYS <= SQUARE)
    tl.static_assert(QUERIES <= SQUARE or not KEYS_FIRST)
    G: tl.constexpr = (KEYS if KEYS_FIRST else QUERIES) // 16
    N: tl.constexpr = (QUERIES if KEYS_FIRST else KEYS) // 8
    group = tl.arange(0, G)[:, None, None]
    a = tl.arange(0, 8)[None, :, None]
    b = tl.arange(0, 8)[None, None, :]
    i = i0 // 16 & 3 if QUERIES < SQUARE else 0  # in 16 queries or keys, from the beginning of a square on
    j = j0 // 16 & 3 if KEYS < SQUARE else 0
    if KEYS_FIRST:
        offset = 16 * b + 2 * a + i // 2 + group * 0
        shift = (i & 1) * 16 + (j + group) * 4 + (a + b) * 0
    else:
        i += group
        offset = i // 4 * WORDS + 16 * a + 2 * b + (i // 2 & 1)
        shift = (i & 1) * 16 + j * 4 + (a + b) * 0
    offsets = ()
    shifts = ()
    upper = ()
    lower = ()
    for n in tl.static_range(N):
        bit = n // 2 % 2 * 16 + n % 2 * 2 if KEYS_FIRST else n // 2 * 4 + n % 2
        offsets += (offset + (n // 4 if KEYS_FIRST else 0),)  # type: ignore[assignment]
        shifts += (shift,)  # type: ignore[assignment]
        upper += (tl.full([G, 8, 8], 1 << bit, tl.int32),)  # type: ignore[assignment]
        lower += (tl.full([G, 8, 8], (2 if KEYS_FIRST else 4) << bit, tl.int32),)  # type: ignore[assignment]
    offset = _laid_out(offsets, offsets, G, N)
    word = tl.reshape(tl.gather(words, tl.reshape(offset, [128 * G * N]), 0), [16 * G, 8 * N])
    return (word >> _laid_out(shifts, shifts, G, N)) & _laid_out(upper, lower, G, N)


@triton.jit
def keep(x, bits):
    """x where `bits` is not 0, else 0. Behind `tl.where` the compiler would round x to 16 bits first, and then
    choose one number at a time."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .pred kept; setp.ne.s32 kept, $2, 0; selp.f32 $0, $1, 0f00000000, kept; }",
            "=f,f,r", [x, bits], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.where(bits != 0, x, 0.0)


@triton.jit
def _laid_out(upper, lower, G: tl.constexpr, N: tl.constexpr):
    """N squares of 8 × 8 for the upper and for the lower half of each 16 rows → a tile."""
    tile = tl.join(side_by_side(upper, G, 0, N), side_by_side(lower, G, 0, N))
    return tl.reshape(tl.permute(tile, 0, 4, 1, 3, 2), [16 * G, 8 * N])
