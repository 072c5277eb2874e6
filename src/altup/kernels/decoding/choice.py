"""The Triton kernel behind a decoder's head: the likeliest token of each row, put where the next step reads it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from altup.kernels.decoding.attention import programmed

BLOCK = 1024


@triton.jit
def choice_kernel(
    tokens,
    latest,
    place,
    ended,
    tops,
    found,
    eos,
    tiles,
    limit,
    pad,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    row = tl.program_id(0)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    slots = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tiles, BLOCK):
        mask = start + slots < tiles
        number = tl.load(tops + row * tiles + start + slots, mask=mask, other=float("-inf"))
        token = tl.load(found + row * tiles + start + slots, mask=mask, other=0)
        where = tl.where(number > best, token, where)
        best = tl.where(number > best, number, best)
    token = tl.min(tl.where(best == tl.max(best, axis=0), where, 2**31 - 1), axis=0).to(tl.int64)
    had_ended = tl.load(ended + row)
    token = tl.where(had_ended != 0, tl.cast(pad, tl.int64), token)
    for i in tl.static_range(ENDS):
        had_ended = tl.where(token == tl.load(eos + i), tl.full([], 1, tl.uint8), had_ended)
    now = tl.load(place + row) + 1
    tl.store(tokens + row * limit + now, token)
    tl.store(latest + row, token)
    tl.store(place + row, now)
    tl.store(ended + row, had_ended)


def choose(
    tops: Tensor,
    found: Tensor,
    tokens: Tensor,
    latest: Tensor,
    place: Tensor,
    ended: Tensor,
    eos: Tensor | None,
    pad: int,
    programmatic: bool,
) -> None:
    """See `kernels.decoding.choose`; tops and found: [rows, tiles], of which the largest one is looked for."""
    rows, tiles = tops.shape
    with torch.cuda.device_of(tops):
        choice_kernel[(rows,)](
            tokens, latest, place, ended.view(torch.uint8), tops, found, eos, tiles, tokens.shape[1], pad,
            ENDS=0 if eos is None else eos.numel(), BLOCK=BLOCK, num_warps=4, **programmed(programmatic),
        )  # fmt: skip
