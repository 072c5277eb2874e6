"""Philox 2×32 inside kernels, and the kernel that draws dropout's masks; `reference.py` defines both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout import reference
from altup.kernels.dropout.reference import LANES, drop_below
from altup.kernels.launch import ceil_div
from altup.kernels.operators import operator

ROUNDS = tl.constexpr(reference.ROUNDS)
KEY_ROUNDS = tl.constexpr(reference.KEY_ROUNDS)
MULTIPLIER = tl.constexpr(reference.MULTIPLIER)
WEYL = tl.constexpr(reference.WEYL)


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


def of_sequences(seed: Tensor | None, x: Tensor) -> dict[str, Any]:
    """For kernels over the rows of x, [..., tokens, d]: whether in place of a seed there are factors of each
    sequence, and how many rows share them."""
    shared = seed is not None and seed.is_floating_point()
    return {"tokens": x.shape[-2] if shared else 1, "SHARED": shared}


@operator("altup::keep_mask")
def keep_mask_op(seed: Tensor, shape: Sequence[int], p: float) -> Iterator[Tensor]:
    """Which elements of a tensor are kept under `seed` [1], int64: bool, contiguous. It is given a shape and not
    what is dropped, so that compiled code need not write that out."""
    mask = torch.empty(shape, dtype=torch.bool, device=seed.device)
    yield mask
    if mask.numel():
        keep_mask_kernel[(ceil_div(mask.numel(), 4 * LANES),)](
            mask, seed, mask.numel(), drop_below(p), LANES=LANES, num_warps=4
        )


@triton.jit(do_not_specialize=["drop_below"])
def keep_mask_kernel(mask, seed, numel, drop_below, LANES: tl.constexpr):
    random = stream_keys(tl.load(seed), tl.zeros([], tl.int32))
    counter = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    a, b = stream_words(random, counter, counter >> 32)
    offset = tl.program_id(0).to(tl.int64) * (4 * LANES) + tl.arange(0, LANES)
    lower, upper = upper_halves(a)
    tl.store(mask + offset, lower >= drop_below, mask=offset < numel)
    tl.store(mask + offset + LANES, upper >= drop_below, mask=offset + LANES < numel)
    lower, upper = upper_halves(b)
    tl.store(mask + offset + 2 * LANES, lower >= drop_below, mask=offset + 2 * LANES < numel)
    tl.store(mask + offset + 3 * LANES, upper >= drop_below, mask=offset + 3 * LANES < numel)
