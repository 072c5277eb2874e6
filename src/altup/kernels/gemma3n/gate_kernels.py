"""Triton kernels of the feed-forward network's gate: what stands between its first matrices and its last.

With s = gate or, where a share of zeros is wanted, relu(gate − μ − zσ) with a token's mean μ and deviation σ:

    forward     out = gelu(s) ∘ up
    backward    d_up = G ∘ gelu(s),    h = G ∘ up ∘ gelu'(s),    d_gate = h − Σh · (1 + z (gate − μ) / σ) / d

with h = 0 where s = 0; without the share of zeros d_gate is h. gelu(s) = s·sigmoid(2u) with
u = √(2/π) (s + 0.044715 s³).
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import load, store, tile, tiles
from altup.kernels.launch import Config, flat, without_autocast
from altup.kernels.operators import Gradients, operator

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


def _gated(gate: Tensor, z: float | None) -> tuple[Tensor, Tensor]:
    """Memory for gelu(s) ∘ up: [..., d], and for each token's mean and standard deviation: [..., 2]."""
    stats = (0,) if z is None else (*gate.shape[:-1], 2)
    return gate.new_empty(gate.shape), gate.new_empty(stats, dtype=torch.float32)


def _launch(kernel: Any, config: Config, outs: tuple, ins: tuple, z: float | None) -> None:
    """`ins` end with gate and up."""
    *ins, gate, up = flat(ins)
    d = gate.shape[-1]
    if gate.numel():
        kernel[(gate.numel() // d,)](
            *outs, *ins, gate, up, d, z or 0.0, SPARSE=z is not None, **tiles(config, gate, up)
        )


@operator("altup::gemma3n_gate")
def gate(gate: Tensor, up: Tensor, z: float | None) -> Iterator[tuple[Tensor, Tensor]]:
    """gelu(s) ∘ up: [..., d], and each token's mean and standard deviation: [..., 2] (empty without z)."""
    out, stats = _gated(gate, z)
    yield out, stats
    _launch(_forward_kernel, FORWARD, (out, stats), (gate, up), z)


@operator("altup::gemma3n_gate_backward")
def gate_backward(
    grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, z: float | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of gate and up."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    yield d_gate, d_up
    _launch(_backward_kernel, BACKWARD, (d_gate, d_up, None), (grad, stats, gate, up), z)


@gate.gradient
def _(d_out: Tensor, _stats: None, *, gate: Tensor, up: Tensor, z: float | None, stats: Tensor) -> Gradients:
    d_gate, d_up = gate_backward(d_out, stats, gate, up, z)
    return {"gate": d_gate, "up": d_up}


@operator("altup::gemma3n_gated_linear")
def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, z: float | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(gelu(s) ∘ up)·weightᵀ: [..., n], and `gate`'s second; weight: [n, d].

    What the map reads is as wide as the gate and made from gate and up in one pass. It is made again in the
    backward pass instead of kept: an eighth of all that a layer of E2B would keep.
    """
    hidden, stats = _gated(gate, z)
    out = gate.new_empty(*gate.shape[:-1], len(weight))
    yield out, stats
    _launch(_forward_kernel, FORWARD, (hidden, stats), (gate, up), z)
    with without_autocast(gate.device.type):
        torch.mm(hidden.view(-1, hidden.shape[-1]), weight.t(), out=out.view(-1, len(weight)))


@operator("altup::gemma3n_gated_linear_backward")
def gated_linear_backward(
    grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, weight: Tensor, z: float | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The gradients of gate, up and weight."""
    d_gate, d_up, hidden = (x.new_empty(x.shape) for x in (gate, up, gate))
    d_weight = weight.new_empty(weight.shape)
    yield d_gate, d_up, d_weight
    rows = grad.reshape(-1, grad.shape[-1])
    with without_autocast(gate.device.type):
        _launch(_backward_kernel, BACKWARD, (d_gate, d_up, hidden), (rows @ weight, stats, gate, up), z)
        torch.mm(rows.t(), hidden.view(-1, hidden.shape[-1]), out=d_weight)


@gated_linear.gradient
def _(
    d_out: Tensor, _stats: None, *, gate: Tensor, up: Tensor, weight: Tensor, z: float | None, stats: Tensor
) -> Gradients:
    d_gate, d_up, d_weight = gated_linear_backward(d_out, stats, gate, up, weight, z)
    return {"gate": d_gate, "up": d_up, "weight": d_weight}
