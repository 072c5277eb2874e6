"""The kernels of gated layers. A program makes four times LANES numbers, as the kernel of dropout's masks does.

With x the gate, y the linear part, f the activation, d the gradient of the result and z what dropout multiplies it
by, d_x = d·z·y·f'(x) and d_y = d·z·f(x). f(x) = x·sigmoid(t) with t = 2·√(2/π)·(x + 0.044715·x³) for GELU and
t = x for SiLU, so f' = sigmoid(t)·(1 + x·(1 − sigmoid(t))·t').
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.dropout.reference import LANES, drop_below, keep_scale
from altup.kernels.dropout.triton import of_sequences, stream_keys, stream_words, upper_halves
from altup.kernels.operators import Gradients, operator

WARPS = 4


@operator("altup::gated")
def gated_op(h: Tensor, seed: Tensor | None, p: float, activation: str) -> Iterator[Tensor]:
    """h: [..., 2·n], contiguous → [..., n]; dropout has a seed [1], int64, or in its place the factors of each
    sequence, [..., 1, n], float32."""
    hidden = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
    yield hidden
    _launch(forward_kernel, (hidden, h, seed), hidden, p, activation)


@operator("altup::gated_backward")
def gated_backward(grad: Tensor, h: Tensor, seed: Tensor | None, p: float, activation: str) -> Iterator[Tensor]:
    d_h = torch.empty_like(h)
    yield d_h
    grad = grad.contiguous()
    _launch(backward_kernel, (d_h, grad, h, seed), grad, p, activation)


@gated_op.gradient
def _(d_hidden: Tensor, *, h: Tensor, seed: Tensor | None, p: float, activation: str) -> Gradients:
    return {"h": gated_backward(d_hidden, h, seed, p, activation)}


def _launch(kernel: Any, tensors: tuple, hidden: Tensor, p: float, activation: str) -> None:
    *_, seed = tensors
    n = hidden.shape[-1]
    kernel[(triton.cdiv(hidden.numel(), 4 * LANES),)](
        *tensors, hidden.numel(), drop_below(p), keep_scale(p), **of_sequences(seed, hidden),
        N=n, V=_vector(n), DROPOUT=seed is not None, LANES=LANES, SILU=activation == "silu", num_warps=WARPS,
    )  # fmt: skip


def _vector(n: int) -> int:
    """How many neighbours are read at once: eight where rows begin at multiples of that."""
    return math.gcd(n, 8)


@triton.jit
def _share(x, SILU: tl.constexpr):
    """sigmoid(t), with f(x) = x·sigmoid(t)."""
    return tl.sigmoid(x if SILU else 1.5957691216057308 * x * (1 + 0.044715 * x * x))


@triton.jit
def _positions(start, tokens, N: tl.constexpr, LANES: tl.constexpr, V: tl.constexpr):
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
    SILU: tl.constexpr,
):  # fmt: skip
    """hidden[r, c] = f(h[r, c])·h[r, N + c], and dropout; SHARED: by factors of each sequence."""
    start = tl.program_id(0).to(tl.int64) * (4 * LANES)
    if DROPOUT and not SHARED:
        factors = _factors(seed, drop_below, keep_scale, LANES)
    for quarter in tl.static_range(4):
        offset, here, there = _positions(start + quarter * LANES, tokens, N, LANES, V)
        inside = offset < numel
        x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(h + here + N, mask=inside, other=0.0).to(tl.float32)
        result = x * _share(x, SILU) * y
        if SHARED:
            result *= tl.load(seed + there, mask=inside, other=0.0)
        elif DROPOUT:
            result *= tl.reshape(factors[quarter], [LANES // V, V])
        tl.store(hidden + offset, result.to(hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["drop_below"])
def backward_kernel(
    d_h, grad, h, seed, numel, drop_below, keep_scale, tokens,
    N: tl.constexpr, V: tl.constexpr, DROPOUT: tl.constexpr, LANES: tl.constexpr, SHARED: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (4 * LANES)
    if DROPOUT and not SHARED:
        factors = _factors(seed, drop_below, keep_scale, LANES)
    for quarter in tl.static_range(4):
        offset, here, there = _positions(start + quarter * LANES, tokens, N, LANES, V)
        inside = offset < numel
        x = tl.load(h + here, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(h + here + N, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
        if SHARED:
            d *= tl.load(seed + there, mask=inside, other=0.0)
        elif DROPOUT:
            d *= tl.reshape(factors[quarter], [LANES // V, V])
        share = _share(x, SILU)
        slope = 1.0 if SILU else 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
        d_gate = d * y * share * (1 + x * (1 - share) * slope)
        tl.store(d_h + here, d_gate.to(d_h.dtype.element_ty), mask=inside)
        tl.store(d_h + here + N, (d * x * share).to(d_h.dtype.element_ty), mask=inside)
