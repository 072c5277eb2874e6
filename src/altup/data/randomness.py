"""Randomness without state: every draw is a hash of its coordinates, so any of them can be computed directly.

The hash is the finaliser of SplitMix64, a bijection of 64-bit numbers that passes the usual test batteries when
fed with a counter. All functions work on whole arrays of uint64; overflow wraps, as the mathematics wants.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 6


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, in place on a fresh array."""
    x = x + GOLDEN
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def keys(seed: int, *coordinates: int | np.ndarray) -> np.ndarray:
    """One uint64 key for each set of coordinates: arrays of the same shape, or numbers for all of them."""
    shape = np.broadcast_shapes(*(np.shape(c) for c in coordinates))
    key = mix(np.full(shape, seed % 2**64, np.uint64))
    for coordinate in coordinates:
        key = mix(key ^ np.asarray(coordinate).astype(np.uint64))
    return key


def draws(key: np.ndarray, lanes: int, stream: int = 0) -> np.ndarray:
    """`[n, lanes]` independent 64-bit numbers from keys `[n]`; each `stream` gives others."""
    key = mix(key ^ mix(np.full(key.shape, stream, np.uint64)))
    return mix(key[:, None] + np.arange(lanes, dtype=np.uint64) * GOLDEN)


def below(numbers: np.ndarray, bound: int) -> np.ndarray:
    """64-bit numbers → whole numbers in [0, bound), bound at most 2^32, uniform to within 2^-32."""
    return ((numbers >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)


def choose(key: np.ndarray, count: int, among: int, stream: int = 0) -> np.ndarray:
    """`[n, count]` different numbers of 0..among-1 in rising order, every subset equally likely.

    The positions of the `count` smallest of `among` random numbers; the place itself in the low bits breaks ties.
    """
    if count == 0:
        return np.empty((len(key), 0), np.int64)
    bits = np.uint64(among.bit_length())
    numbers = (draws(key, among, stream) >> bits << bits) | np.arange(among, dtype=np.uint64)
    if count < among:
        numbers.partition(count - 1, axis=1)
    positions = (numbers[:, :count] & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    positions.sort(axis=1)
    return positions


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where `index` (in 0..size-1) goes under the permutation of 0..size-1 that `key` names, elementwise.

    A balanced Feistel network permutes the smallest even number of bits that holds `size`; results beyond `size`
    are sent through again until they fall inside (cycle walking: fewer than 4 rounds on average). Below 6 bits
    such networks are visibly uneven, so that is the least.
    """
    half = np.uint64(max(3, ((size - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    x = np.asarray(index).astype(np.uint64)
    walking = np.arange(len(x))
    while len(walking):
        left, right, mine = x[walking] >> half, x[walking] & low, key[walking]
        for step in range(ROUNDS):
            left, right = right, left ^ (mix(mix(mine + np.uint64(step)) ^ right) & low)
        x[walking] = left << half | right
        walking = walking[x[walking] >= size]
    return x.astype(np.int64)
