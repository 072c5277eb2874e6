"""The kernel that draws dropout's masks; see `dropout.keep_mask_reference`, which is the definition."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout import LANES
from altup.kernels.philox import drop_below
from altup.kernels.philox_triton import stream_keys, stream_words, upper_halves


def keep_mask(mask: Tensor, seed: Tensor, p: float) -> None:
    """Fill a contiguous bool tensor."""
    if mask.numel():
        keep_mask_kernel[(triton.cdiv(mask.numel(), 4 * LANES),)](
            mask, seed, mask.numel(), drop_below(p), LANES=LANES, num_warps=4
        )


@triton.jit(do_not_specialize=["drop_below"])
def keep_mask_kernel(mask, seed, numel, drop_below, LANES: tl.constexpr):
    random = stream_keys(tl.load(seed), tl.zeros([], tl.int32))
    counter = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    a, b = stream_words(random, counter, counter >> 32)
    place = tl.program_id(0).to(tl.int64) * (4 * LANES) + tl.arange(0, LANES)
    lower, upper = upper_halves(a)
    tl.store(mask + place, lower >= drop_below, mask=place < numel)
    tl.store(mask + place + LANES, upper >= drop_below, mask=place + LANES < numel)
    lower, upper = upper_halves(b)
    tl.store(mask + place + 2 * LANES, lower >= drop_below, mask=place + 2 * LANES < numel)
    tl.store(mask + place + 3 * LANES, upper >= drop_below, mask=place + 3 * LANES < numel)
