"""Triton kernels of the feed-forward network's gate: what stands between its first matrices and its last.

With s = gate or, where a share of zeros is wanted, relu(gate − μ − zσ) with a token's mean μ and deviation σ:

    forward     out = gelu(s) ∘ up
    backward    d_up = G ∘ gelu(s),    h = G ∘ up ∘ gelu'(s),    d_gate = h − Σh · (1 + z (gate − μ) / σ) / d

with h = 0 where s = 0; without the share of zeros d_gate is h. gelu(s) = s·sigmoid(2u) with
u = √(2/π) (s + 0.044715 s³).
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import load, store, tile, tiles
from altup.kernels.launch import Config, flat

FORWARD = Config(warps=4, vectors=1)  # not timed yet
BACKWARD = Config(warps=4, vectors=1)


@triton.jit
def _gelu(s):
    """gelu(s), and its slope."""
    slope = 1.5957691216057308 * (1.0 + 0.134145 * s * s)
    share = tl.sigmoid(1.5957691216057308 * s * (1.0 + 0.044715 * s * s))
    return s * share, share + s * share * (1.0 - share) * slope


@triton.jit
def _forward_kernel(
    out, stats, gate, up, d, deviations, SPARSE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    if SPARSE:
        sums = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            sums += tl.sum(load(gate, token * d + column, lanes, lanes < d - column), axis=1)
        mean = tl.sum(sums) / d
        squares = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            mask = lanes < d - column
            apart = tl.where(mask, load(gate, token * d + column, lanes, mask) - mean, 0.0)
            squares += tl.sum(apart * apart, axis=1)
        deviation = tl.sqrt(tl.sum(squares) / d)
        tl.store(stats + token * 2, mean)
        tl.store(stats + token * 2 + 1, deviation)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        s = load(gate, start, lanes, mask)
        if SPARSE:
            s = tl.maximum(s - (mean + deviations * deviation), 0.0)
        activated, _ = _gelu(s)
        store(out, start, lanes, activated * load(up, start, lanes, mask), mask)


@triton.jit
def _backward_kernel(
    d_gate,
    d_up,
    out,
    grad,
    stats,
    gate,
    up,
    d,
    deviations,
    SPARSE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    if SPARSE:
        mean = tl.load(stats + token * 2)
        deviation = tl.load(stats + token * 2 + 1)
        cut = mean + deviations * deviation
        sums = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            start = token * d + column
            mask = lanes < d - column
            s = load(gate, start, lanes, mask) - cut
            _, slope = _gelu(tl.maximum(s, 0.0))
            h = load(grad, start, lanes, mask) * load(up, start, lanes, mask) * slope
            sums += tl.sum(tl.where(s > 0, h, 0.0), axis=1)
        whole = tl.sum(sums) / d
        along = tl.where(deviation > 0, whole * deviations / tl.where(deviation > 0, deviation, 1.0), 0.0)
    for column in range(0, d, BLOCK):  # once more, out of the cache
        start = token * d + column
        mask = lanes < d - column
        value = load(gate, start, lanes, mask)
        upstream = load(grad, start, lanes, mask)
        s = tl.maximum(value - cut, 0.0) if SPARSE else value
        activated, slope = _gelu(s)
        store(d_up, start, lanes, upstream * activated, mask)
        other = load(up, start, lanes, mask)
        if out is not None:
            store(out, start, lanes, activated * other, mask)
        h = upstream * other * slope
        if SPARSE:
            h = tl.where(s > 0, h, 0.0) - whole - along * (value - mean)
        store(d_gate, start, lanes, h, mask)


def forward(out: Tensor, stats: Tensor, gate: Tensor, up: Tensor, z: float | None) -> None:
    """Fill `out` and, where z is given, each token's mean and standard deviation: [..., 2]."""
    gate, up = flat((gate, up))
    tokens, d = gate.numel() // gate.shape[-1], gate.shape[-1]
    if tokens:
        _forward_kernel[(tokens,)](
            out, stats, gate, up, d, z or 0.0, SPARSE=z is not None, **tiles(FORWARD, gate, up)
        )


def backward(
    d_gate: Tensor,
    d_up: Tensor,
    out: Tensor | None,
    grad: Tensor,
    stats: Tensor,
    gate: Tensor,
    up: Tensor,
    z: float | None,
) -> None:
    """Fill the gradients of gate and up, and `out` once more where it is given."""
    grad, gate, up = flat((grad, gate, up))
    tokens, d = gate.numel() // gate.shape[-1], gate.shape[-1]
    if tokens:
        _backward_kernel[(tokens,)](
            d_gate, d_up, out, grad, stats, gate, up, d, z or 0.0,
            SPARSE=z is not None, **tiles(BACKWARD, gate, up),
        )  # fmt: skip
