"""GEGLU's kernels. A program makes four times LANES numbers, as the kernel of dropout's masks does."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout.reference import LANES, drop_below, keep_scale
from altup.kernels.dropout.triton import of_sequences, stream_keys, stream_words, upper_halves

WARPS = 4


def forward(hidden: Tensor, h: Tensor, seed: Tensor | None, p: float) -> None:
    forward_kernel[(triton.cdiv(hidden.numel(), 4 * LANES),)](
        hidden, h, seed, hidden.numel(), drop_below(p), keep_scale(p),
        N=hidden.shape[-1], V=_vector(hidden.shape[-1]), DROPOUT=seed is not None, LANES=LANES, num_warps=WARPS,
        **of_sequences(seed, hidden),
    )  # fmt: skip


def backward(d_h: Tensor, grad: Tensor, h: Tensor, seed: Tensor | None, p: float) -> None:
    backward_kernel[(triton.cdiv(grad.numel(), 4 * LANES),)](
        d_h, grad, h, seed, grad.numel(), drop_below(p), keep_scale(p),
        N=grad.shape[-1], V=_vector(grad.shape[-1]), DROPOUT=seed is not None, LANES=LANES, num_warps=WARPS,
        **of_sequences(seed, grad),
    )  # fmt: skip


def _vector(n: int) -> int:
    """How many neighbours are read at once: eight where rows begin at multiples of that."""
    return math.gcd(n, 8)


@triton.jit
def _share(x):
    """sigmoid(2u), with gelu(x) = x·sigmoid(2u) and u = √(2/π)·(x + 0.044715·x³)."""
    return tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))


@triton.jit
def _places(start, tokens, N: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr):
    """Where LANES numbers of the result lie, from number `start` on, where their gates do, and where the factors
    of a sequence of `tokens` rows: [LANES/V, V], V of them neighbours in all three, which are read and written
    together. Of 64 bits only scalars are divided."""
    group = tl.arange(0, LANES // V)
    inner = tl.arange(0, V)
    own = (start + group * V)[:, None] + inner[None, :]
    group += (start % N).to(tl.int32) // V
    first, row = start // N, group // (N // V)
    column = (group % (N // V) * V)[:, None] + inner[None, :]
    sequence = first // tokens + ((first % tokens).to(tl.int32) + row) // tokens
    return own, ((first + row) * (2 * N))[:, None] + column, (sequence * N)[:, None] + column


@triton.jit
def _factors(seed, drop_below, keep_scale, LANES: tl.constexpr):
    """What dropout multiplies the program's four times LANES numbers by."""
    random = stream_keys(tl.load(seed), tl.zeros([], tl.int32))
    counter = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    a, b = stream_words(random, counter, counter >> 32)
    first, second = upper_halves(a)
    third, fourth = upper_halves(b)
    return (
        tl.where(first >= drop_below, keep_scale, 0.0),
        tl.where(second >= drop_below, keep_scale, 0.0),
        tl.where(third >= drop_below, keep_scale, 0.0),
        tl.where(fourth >= drop_below, keep_scale, 0.0),
    )


@triton.jit(do_not_specialize=["drop_below"])
def forward_kernel(
    hidden, h, seed, numel, drop_below, keep_scale, tokens,
    N: tl.constexpr, V: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """hidden[r, c] = gelu(h[r, c])·h[r, N + c], and dropout; SHARED: by factors of each sequence."""
    start = tl.program_id(0).to(tl.int64) * (4 * LANES)
    if DROPOUT and not SHARED:
        factors = _factors(seed, drop_below, keep_scale, LANES)
    for quarter in tl.static_range(4):
        place, here, there = _places(start + quarter * LANES, tokens, N, LANES, V)
        inside = place < numel
        x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(h + here + N, mask=inside, other=0.0).to(tl.float32)
        result = x * _share(x) * y
        if SHARED:
            result *= tl.load(seed + there, mask=inside, other=0.0)
        elif DROPOUT:
            result *= tl.reshape(factors[quarter], [LANES // V, V])
        tl.store(hidden + place, result.to(hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["drop_below"])
def backward_kernel(
    d_h, grad, h, seed, numel, drop_below, keep_scale, tokens,
    N: tl.constexpr, V: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (4 * LANES)
    if DROPOUT and not SHARED:
        factors = _factors(seed, drop_below, keep_scale, LANES)
    for quarter in tl.static_range(4):
        place, here, there = _places(start + quarter * LANES, tokens, N, LANES, V)
        inside = place < numel
        x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(h + here + N, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if SHARED:
            d *= tl.load(seed + there, mask=inside, other=0.0)
        elif DROPOUT:
            d *= tl.reshape(factors[quarter], [LANES // V, V])
        share = _share(x)
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
        d_gate = d * y * share * (1 + x * (1 - share) * slope)
        tl.store(d_h + here, d_gate.to(d_h.dtype.element_ty), mask=inside)
        tl.store(d_h + here + N, (d * x * share).to(d_h.dtype.element_ty), mask=inside)
