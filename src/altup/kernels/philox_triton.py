"""Philox 2×32 inside kernels; see `philox`, which is the definition."""

from __future__ import annotations

import triton
import triton.language as tl

from altup.kernels import philox as plain

ROUNDS = tl.constexpr(plain.ROUNDS)
KEY_ROUNDS = tl.constexpr(plain.KEY_ROUNDS)
MULTIPLIER = tl.constexpr(plain.MULTIPLIER)
WEYL = tl.constexpr(plain.WEYL)


@triton.jit
def philox(c0, c1, key, rounds: tl.constexpr = ROUNDS):
    """Two random words for counters and a key of the type uint32."""
    multiplier = tl.full([], MULTIPLIER, tl.uint64)
    weyl = tl.full([], WEYL, tl.uint32)
    for _ in tl.static_range(rounds):
        product = c0.to(tl.uint64) * multiplier  # one instruction gives both halves
        c0 = (product >> 32).to(tl.uint32) ^ c1 ^ key
        c1 = product.to(tl.uint32)
        key += weyl
    return c0, c1


@triton.jit
def stream_keys(seed, stream):
    """The two keys of a stream of numbers under a 64-bit seed."""
    return philox(seed.to(tl.uint32), (seed >> 32).to(tl.uint32), stream.to(tl.uint32), KEY_ROUNDS)


@triton.jit
def stream_words(keys, c0, c1):
    """The two words of a counter in a stream."""
    return philox(c0.to(tl.uint32), c1.to(tl.uint32) ^ keys[1], keys[0])


@triton.jit
def upper_halves(word):
    """A word's lower and upper 16 bits, each in the upper half of a signed word, where a threshold can be."""
    return (word << 16).to(tl.int32, bitcast=True), word.to(tl.int32, bitcast=True)
