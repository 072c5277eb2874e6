"""Triton kernels of what stands before Gemma 3n's first layer and behind its last: blocks of one magnitude.

With t = √mean(h²), nᵢ = √max(mean(pᵢ²), smallest) and sᵢ = t / nᵢ:

    lift        block 0 is h, block i is sᵢ pᵢ
    lower       (h + Σ sᵢ pᵢ) / K
    backward    dsᵢ = ⟨Gⁱ, pᵢ⟩,    dpᵢ = sᵢ Gⁱ − pᵢ dsᵢ sᵢ / (nᵢ² d),    dh = G⁰ + h Σ (dsᵢ / nᵢ) / (t d)

where nᵢ counts as a number if it is `smallest`, and G is the same for all blocks, over K, behind the last layer.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.reference import SMALLEST
from altup.kernels.gemma3n.tokens import load, load_numbers, store, tile, tiles, zeros
from altup.kernels.launch import Config, flat
from altup.kernels.operators import Gradients, operator

FORWARD = Config(warps=2, vectors=1)  # not timed yet
BACKWARD = Config(warps=1, vectors=1)


@triton.jit
def _forward_kernel(
    outs, sizes, h, projected, d, smallest,
    MEAN: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    sums = zeros(K, BLOCK // WIDTH)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        value = load(h, start, lanes, mask)
        new = (sums[0] + tl.sum(value * value, axis=1),)
        for i in tl.static_range(1, K):
            value = load(projected[i - 1], start, lanes, mask)
            new = new + (sums[i] + tl.sum(value * value, axis=1),)
        sums = new
    target = tl.sqrt(tl.sum(sums[0]) / d)
    tl.store(sizes + token * K, target)
    ratios = (1.0,)
    for i in tl.static_range(1, K):
        size = tl.sqrt(tl.maximum(tl.sum(sums[i]) / d, smallest))
        tl.store(sizes + token * K + i, size)
        ratios = ratios + (target / size,)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        total = load(h, start, lanes, mask)
        if not MEAN:
            store(outs[0], start, lanes, total, mask)
        for i in tl.static_range(1, K):
            matched = load(projected[i - 1], start, lanes, mask) * ratios[i]
            if MEAN:
                total += matched
            else:
                store(outs[i], start, lanes, matched, mask)
        if MEAN:
            store(outs[0], start, lanes, total / K, mask)


@triton.jit
def _backward_kernel(
    dh, d_projected, grads, sizes, h, projected, d, smallest,
    MEAN: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    found = load_numbers(sizes, token * K, K)
    sums = zeros(K, BLOCK // WIDTH)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        new = (sums[0],)
        for i in tl.static_range(1, K):
            grad = load(grads[0 if MEAN else i], start, lanes, mask)
            new = new + (sums[i] + tl.sum(grad * load(projected[i - 1], start, lanes, mask), axis=1),)
        sums = new
    share = 1.0 / K if MEAN else 1.0
    pull = 0.0
    ratios = (1.0,)
    shrink = (0.0,)
    for i in tl.static_range(1, K):
        slope = tl.sum(sums[i]) * share
        ratio = found[0] / found[i]
        squared = found[i] * found[i]
        pull += slope / found[i]
        ratios = ratios + (ratio,)
        shrink = shrink + (tl.where(squared > smallest * 1.000001, slope * ratio / (squared * d), 0.0),)
    pull = tl.where(found[0] > 0, pull / (tl.where(found[0] > 0, found[0], 1.0) * d), 0.0)
    for column in range(0, d, BLOCK):  # once more, out of the cache
        start = token * d + column
        mask = lanes < d - column
        grad = load(grads[0], start, lanes, mask) * share
        store(dh, start, lanes, grad + pull * load(h, start, lanes, mask), mask)
        for i in tl.static_range(1, K):
            if not MEAN:
                grad = load(grads[i], start, lanes, mask)
            value = load(projected[i - 1], start, lanes, mask)
            store(d_projected[i - 1], start, lanes, ratios[i] * grad - shrink[i] * value, mask)


@operator("altup::gemma3n_match")
def match(h: Tensor, projected: Sequence[Tensor], mean: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The matched blocks [K, ..., d], or their mean [..., d], and each token's magnitudes t, n₁..: [..., K]."""
    K, d = 1 + len(projected), h.shape[-1]
    out = h.new_empty(h.shape if mean else (K, *h.shape))
    sizes = h.new_empty(*h.shape[:-1], K, dtype=torch.float32)
    yield out, sizes
    projected, (h,) = flat(projected), flat((h,))
    if h.numel():
        _forward_kernel[(h.numel() // d,)](
            (out,) if mean else out.unbind(0), sizes, h, projected, d, SMALLEST,
            MEAN=mean, K=K, **tiles(FORWARD, h, projected[0]),
        )  # fmt: skip


@operator("altup::gemma3n_match_backward")
def match_backward(
    grads: Tensor, h: Tensor, projected: Sequence[Tensor], sizes: Tensor, mean: bool
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The gradients of h and of what was projected; `grads` are K, or the one of the mean."""
    d = h.shape[-1]
    dh, d_projected = h.new_empty(h.shape), [p.new_empty(p.shape) for p in projected]
    yield dh, d_projected
    upstream, projected, (h,) = flat([grads] if mean else grads.unbind(0)), flat(projected), flat((h,))
    if h.numel():
        _backward_kernel[(h.numel() // d,)](
            dh, tuple(d_projected), upstream, sizes, h, projected, d, SMALLEST,
            MEAN=mean, K=1 + len(projected), **tiles(BACKWARD, h, projected[0]),
        )  # fmt: skip


@match.gradient
def _(d_out: Tensor, _sizes: None, *, h: Tensor, projected: list[Tensor], sizes: Tensor, mean: bool) -> Gradients:
    dh, d_projected = match_backward(d_out, h, projected, sizes, mean)
    return {"h": dh, "projected": d_projected}
