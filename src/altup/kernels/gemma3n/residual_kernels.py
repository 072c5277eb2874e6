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
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import load, store
from altup.kernels.launch import flat, multiprocessors, power_of_two
from altup.kernels.operators import Gradients, operator

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


@operator("altup::gemma3n_residual")
def residual(
    x: Tensor, a: Tensor | None, a_norm: Tensor | None, n: Tensor | None, r: Tensor | None, r_norm: Tensor | None,
    norm: Tensor | None, eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """The sum (empty without `a`), normed where there is a `norm` (else empty), and 1 / rms of a, r and the sum:
    [..., 3]."""
    d = x.shape[-1]
    out, normed = (x.new_empty(0 if t is None else x.shape) for t in (a, norm))
    inverses = x.new_empty(*x.shape[:-1], NORMS, dtype=torch.float32)
    yield out, normed, inverses
    if x.numel():
        given = flat((x, a, a_norm, n, r, r_norm, norm))
        _forward_kernel[(x.numel() // d,)](out, normed, inverses, *given, d, eps, **_tile(d))


@operator("altup::gemma3n_residual_backward")
def residual_backward(
    grad: Tensor, d_normed: Tensor | None, out: Tensor | None, a: Tensor | None, a_norm: Tensor | None,
    r: Tensor | None, r_norm: Tensor | None, norm: Tensor | None, inverses: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of x and n (empty where it is `grad`), of a and r, and of the norms' weights: [3, d], float32.
    Those of what is not given are empty, or not to be read."""
    d = grad.shape[-1]
    tokens = grad.numel() // d
    dx = grad.new_empty(0 if r is None and norm is None else grad.shape)
    da, dr = (grad.new_empty(0) if t is None else t.new_empty(grad.shape) for t in (a, r))
    sums = grad.new_empty(NORMS, d, dtype=torch.float32)
    yield dx, da, dr, sums
    if not tokens:
        sums.zero_()
        return
    given = flat((grad, d_normed, out, a, a_norm, r, r_norm, norm))
    programs = min(tokens, multiprocessors(grad.device) * PROGRAMS_PER_SM)
    parts = grad.new_empty(programs, NORMS, d, dtype=torch.float32)
    into = dx if dx.numel() else None
    _backward_kernel[(programs,)](into, da, dr, parts, *given, inverses, tokens, d, **_tile(d))
    torch.sum(parts, dim=0, out=sums)


@residual.gradient
def _(
    d_out: Tensor, d_normed: Tensor, _inverses: None, *, out: Tensor, a: Tensor, a_norm: Tensor, r: Tensor | None,
    r_norm: Tensor | None, norm: Tensor | None, inverses: Tensor,
) -> Gradients:  # fmt: skip
    whole = (None, None) if norm is None else (d_normed, out)
    dx, da, dr, sums = residual_backward(d_out, *whole, a, a_norm, r, r_norm, norm, inverses)
    dx = dx if dx.numel() else d_out
    gradients = {"x": dx, "a": da} if r is None else {"x": dx, "a": da, "n": dx, "r": dr}
    weights = {"a_norm": a_norm, "r_norm": r_norm, "norm": norm}
    for total, (name, weight) in zip(sums, weights.items(), strict=True):
        if weight is not None:
            gradients[name] = total.to(weight.dtype)
    return gradients


class NormBeside(torch.autograd.Function):
    """x and x normed. Whoever reads x reads this one: the backward pass then adds what comes back along with what
    comes through the norm. An operator may not give back what it was given, so this is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _, normed, inverses = residual(x, None, None, None, None, None, norm, eps)
        ctx.save_for_backward(x, norm, inverses)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, d_normed: Tensor) -> tuple:
        x, norm, inverses = ctx.saved_tensors
        dx, _, _, sums = residual_backward(grad, d_normed, x, None, None, None, None, norm, inverses)
        return dx, sums[2].to(norm.dtype), None
