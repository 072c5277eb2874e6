"""Triton kernels of the additions in a layer of Gemma 3n, with the norms around them.

With rms(v) = √(mean(v²) + ε), N(v, w) = w ∘ v / rms(v) and the upstream gradients G of out and H of normed:

    forward     out = (x + N(a, wₐ) + n + N(r, wᵣ)) / √2,    normed = N(out, w)
    backward    s = (G + N'(H; out, w)) / √2 = dx = dn,    da = N'(s; a, wₐ),    dr = N'(s; r, wᵣ)
                N'(H; v, w) = (w ∘ H − v ⟨w ∘ H, v⟩ / (rms² d)) / rms

Without n and r out = x + N(a, wₐ), and without a it is x, which is only normed. A program holds a token's columns
in registers. Backward it walks on from token to token and adds up its share of Σ H ∘ v / rms, the weights'
gradients.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import load, store
from altup.kernels.launch import flat, multiprocessors, power_of_two

NORMS = 3  # of a, r and out
PROGRAMS_PER_SM = 2  # backward; not timed yet
HALVED = tl.constexpr(1 / math.sqrt(2))


@triton.jit
def _inverse(value, d, eps):
    return 1.0 / tl.sqrt(tl.sum(value * value) / d + eps)


@triton.jit
def _norm_backward(scaled, value, inverse, d):
    """N', given w ∘ H."""
    return inverse * (scaled - value * (tl.sum(scaled * value) * inverse * inverse / d))


@triton.jit
def _forward_kernel(out, normed, inverses, x, a, a_norm, n, r, r_norm, norm, d, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < d
    start = token * d
    total = load(x, start, lanes, mask)
    if a is not None:
        value = load(a, start, lanes, mask)
    if r is not None:
        total += load(n, start, lanes, mask)
        right = load(r, start, lanes, mask)
    if a is not None:
        inverse = _inverse(value, d, eps)
        tl.store(inverses + token * 3, inverse)
        total += value * inverse * load(a_norm, 0, lanes, mask)
    if r is not None:
        inverse = _inverse(right, d, eps)
        tl.store(inverses + token * 3 + 1, inverse)
        total = (total + right * inverse * load(r_norm, 0, lanes, mask)) * HALVED
    if a is not None:
        store(out, start, lanes, total, mask)
    if norm is not None:
        inverse = _inverse(total, d, eps)
        tl.store(inverses + token * 3 + 2, inverse)
        store(normed, start, lanes, total * inverse * load(norm, 0, lanes, mask), mask)


@triton.jit
def _backward_kernel(
    dx, da, dr, sums, grad, d_normed, out, a, a_norm, r, r_norm, norm, inverses, tokens, d, BLOCK: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    mask = lanes < d
    if a is not None:
        a_total = tl.zeros([BLOCK], tl.float32)
    if r is not None:
        r_total = tl.zeros([BLOCK], tl.float32)
    if norm is not None:
        total = tl.zeros([BLOCK], tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        start = token * d
        s = load(grad, start, lanes, mask)
        if a is not None:
            left = load(a, start, lanes, mask)
        if r is not None:
            right = load(r, start, lanes, mask)
        if norm is not None:
            upstream = load(d_normed, start, lanes, mask)
            value = load(out, start, lanes, mask)
            inverse = tl.load(inverses + token * 3 + 2)
            total += upstream * value * inverse
            s += _norm_backward(upstream * load(norm, 0, lanes, mask), value, inverse, d)
        if r is not None:
            s *= HALVED
            inverse = tl.load(inverses + token * 3 + 1)
            r_total += s * right * inverse
            store(dr, start, lanes, _norm_backward(s * load(r_norm, 0, lanes, mask), right, inverse, d), mask)
        if dx is not None:
            store(dx, start, lanes, s, mask)
        if a is not None:
            inverse = tl.load(inverses + token * 3)
            a_total += s * left * inverse
            store(da, start, lanes, _norm_backward(s * load(a_norm, 0, lanes, mask), left, inverse, d), mask)
    place = tl.program_id(0) * 3 * d + lanes
    if a is not None:
        tl.store(sums + place, a_total, mask=mask)
    if r is not None:
        tl.store(sums + place + d, r_total, mask=mask)
    if norm is not None:
        tl.store(sums + place + 2 * d, total, mask=mask)


def _tile(d: int) -> dict[str, int]:
    """A thread holds about 16 bytes of bfloat16."""
    block = power_of_two(d)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def forward(
    out: Tensor | None,
    normed: Tensor | None,
    inverses: Tensor,
    x: Tensor,
    a: Tensor | None,
    a_norm: Tensor | None,
    n: Tensor | None,
    r: Tensor | None,
    r_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> None:
    """Fill `out` (where there is an `a`), `normed` (a `norm`), and 1 / rms of a, r and out: [..., 3]."""
    given = flat((x, a, a_norm, n, r, r_norm, norm))
    d = x.shape[-1]
    if x.numel():
        _forward_kernel[(x.numel() // d,)](out, normed, inverses, *given, d, eps, **_tile(d))


def backward(
    dx: Tensor | None,
    da: Tensor | None,
    dr: Tensor | None,
    grad: Tensor,
    d_normed: Tensor | None,
    out: Tensor | None,
    a: Tensor | None,
    a_norm: Tensor | None,
    r: Tensor | None,
    r_norm: Tensor | None,
    norm: Tensor | None,
    inverses: Tensor,
) -> Tensor:
    """Fill the gradients of x, a and r; gives those of the three norms' weights: [3, d], float32. Those of what is
    not given are not to be read."""
    given = flat((grad, d_normed, out, a, a_norm, r, r_norm, norm))
    d = grad.shape[-1]
    tokens = grad.numel() // d
    programs = max(1, min(tokens, multiprocessors(grad.device) * PROGRAMS_PER_SM))
    sums = grad.new_empty(programs, NORMS, d, dtype=torch.float32)
    if not tokens:
        return sums.zero_()[0]
    _backward_kernel[(programs,)](dx, da, dr, sums, *given, inverses, tokens, d, **_tile(d))
    return sums.sum(dim=0)
