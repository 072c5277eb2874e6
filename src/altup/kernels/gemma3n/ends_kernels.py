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

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.reference import SMALLEST
from altup.kernels.gemma3n.tokens import load, load_numbers, store, tile, tiles, zeros
from altup.kernels.launch import Config, flat

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


def forward(outs: Sequence[Tensor], sizes: Tensor, h: Tensor, projected: Sequence[Tensor], mean: bool) -> None:
    """Fill `outs`, K blocks or their mean, and the sizes t, n₁.. of each token: [..., K]."""
    projected, (h,) = flat(projected), flat((h,))
    tokens, d = h.numel() // h.shape[-1], h.shape[-1]
    if tokens:
        _forward_kernel[(tokens,)](
            tuple(outs), sizes, h, projected, d, SMALLEST,
            MEAN=mean, K=1 + len(projected), **tiles(FORWARD, h, projected[0]),
        )  # fmt: skip


def backward(
    dh: Tensor,
    d_projected: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Tensor,
    h: Tensor,
    projected: Sequence[Tensor],
    mean: bool,
) -> None:
    """Fill the gradients of h and of what was projected; `grads` are K, or the one of the mean."""
    grads, projected, (h,) = flat(grads), flat(projected), flat((h,))
    tokens, d = h.numel() // h.shape[-1], h.shape[-1]
    if tokens:
        _backward_kernel[(tokens,)](
            dh, tuple(d_projected), grads, sizes, h, projected, d, SMALLEST,
            MEAN=mean, K=1 + len(projected), **tiles(BACKWARD, h, projected[0]),
        )  # fmt: skip
