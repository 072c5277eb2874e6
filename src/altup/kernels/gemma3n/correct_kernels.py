"""Triton kernels of the correction: all blocks, with the branch normed and added to all but block 0.

With δ = y − x̂ᵃ, the branch p, r = rms(p), the norm's scale w, the upstream gradients G and q = Σ_{i ≥ 1} Gⁱ:

    forward     x_newⁱ = x̂ⁱ + gᵢ δ, and for i ≥ 1 also w ∘ p / r
    backward    dgᵢ = ⟨Gⁱ, δ⟩,    dy = Σ gᵢ Gⁱ,    dx̂ᵃ = Gᵃ − dy,    dp = (w ∘ q − p ⟨w ∘ q, p⟩ / (r² d)) / r

The other predicted blocks' gradients are G itself. That of w is a sum over tokens, by another kernel.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
    blocks_of,
    load,
    load_blocks,
    load_numbers,
    load_sum,
    store,
    sum_columns,
    tile,
    tiles,
    zeros,
)
from altup.kernels.launch import Config, flat
from altup.kernels.operators import Gradients, operator

# As for `altup_update_dynamic`, whose loops these are; not timed yet.
FORWARD = Config(warps=2, vectors=1)
BACKWARD = Config(warps=1, vectors=1)


@triton.jit
def _forward_kernel(
    outs, inverses, predicted, y, g, branch, norm, d, eps,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    weights = load_numbers(g, token * K, K)
    if branch is not None:
        squares = tl.zeros([BLOCK // WIDTH], tl.float32)
        for column in range(0, d, BLOCK):
            value = load(branch, token * d + column, lanes, lanes < d - column)
            squares += tl.sum(value * value, axis=1)
        inverse = 1.0 / tl.sqrt(tl.sum(squares) / d + eps)
        tl.store(inverses + token, inverse)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        active = load(predicted[ACTIVE], start, lanes, mask)
        innovation = load(y, start, lanes, mask) - active
        if branch is not None:
            added = load(branch, start, lanes, mask) * inverse * load(norm, column, lanes, mask)
        for i in tl.static_range(K):
            if i == ACTIVE:
                new = active + weights[i] * innovation
            else:
                new = load(predicted[i], start, lanes, mask) + weights[i] * innovation
            if i > 0 and branch is not None:
                new += added
            store(outs[i], start, lanes, new, mask)


@triton.jit
def _backward_kernel(
    dy, d_predicted, dg, d_branch, grads, predicted, y, g, branch, norm, inverses, d,
    ACTIVE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lanes = tile(BLOCK, WIDTH)
    weights = load_numbers(g, token * K, K)
    sums = zeros(K, BLOCK // WIDTH)
    along = tl.zeros([BLOCK // WIDTH], tl.float32)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        innovation = load(y, start, lanes, mask) - load(predicted, start, lanes, mask)
        grad = load_blocks(grads, start, lanes, mask, K)
        total = weights[0] * grad[0]
        for i in tl.static_range(1, K):
            total += weights[i] * grad[i]
        store(dy, start, lanes, total, mask)
        store(d_predicted, start, lanes, grad[ACTIVE] - total, mask)
        new = ()
        for i in tl.static_range(K):
            new = new + (sums[i] + tl.sum(grad[i] * innovation, axis=1),)
        sums = new
        if branch is not None:
            added = grad[1]
            for i in tl.static_range(2, K):
                added += grad[i]
            scaled = added * load(norm, column, lanes, mask)
            along += tl.sum(scaled * load(branch, start, lanes, mask), axis=1)
    for i in tl.static_range(K):
        tl.store(dg + token * K + i, tl.sum(sums[i]))
    if branch is not None:
        inverse = tl.load(inverses + token)
        share = tl.sum(along) * inverse * inverse / d
        for column in range(0, d, BLOCK):  # once more, out of the cache: the norm waited for its sum
            start = token * d + column
            mask = lanes < d - column
            added = load_sum(grads, start, lanes, mask, K)
            value = load(branch, start, lanes, mask)
            dp = inverse * (added * load(norm, column, lanes, mask) - share * value)
            store(d_branch, start, lanes, dp, mask)


@triton.jit
def _norm_sums_kernel(sums, grads, branch, inverses, tokens, rows, d, K: tl.constexpr, BLOCK: tl.constexpr):
    """Σ q ∘ p / r over `rows` tokens from the program's first."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1).to(tl.int64)
    mask = columns < d
    total = tl.zeros([BLOCK], tl.float32)
    for token in range(chunk * rows, tl.minimum((chunk + 1) * rows, tokens)):
        added = load_sum(grads, token * d, columns, mask, K)
        total += added * load(branch, token * d, columns, mask) * tl.load(inverses + token)
    tl.store(sums + chunk * d + columns, total, mask=mask)


@operator("altup::gemma3n_correct")
def correct(
    predicted: Sequence[Tensor], y: Tensor, g: Tensor, branch: Tensor | None, norm: Tensor | None, active: int,
    eps: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The new state [K, ..., d], and 1 / rms(branch): [...] (empty without one)."""
    K = g.shape[-1]
    new, inverses = y.new_empty(K, *y.shape), g.new_empty(0 if branch is None else y.shape[:-1])
    yield new, inverses
    blocks, (y, g, branch, norm) = flat(blocks_of(predicted)), flat((y, g, branch, norm))
    if y.numel():
        _forward_kernel[(y.numel() // y.shape[-1],)](
            new.unbind(0), inverses, blocks, y, g, branch, norm, y.shape[-1], eps,
            ACTIVE=active, K=K, **tiles(FORWARD, y, blocks[0], branch),
        )  # fmt: skip


@operator("altup::gemma3n_correct_backward")
def correct_backward(
    grads: Tensor, predicted: Tensor, y: Tensor, g: Tensor, branch: Tensor | None, norm: Tensor | None,
    inverses: Tensor, active: int, norm_grad: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of y, x̂ᵃ (`predicted`), g, branch and norm (float32); what is not asked for is empty."""
    dy, d_predicted, dg = y.new_empty(y.shape), predicted.new_empty(predicted.shape), g.new_empty(g.shape)
    d_branch = y.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    d_norm = g.new_empty(y.shape[-1] if norm_grad else 0)
    yield dy, d_predicted, dg, d_branch, d_norm
    upstream = flat(grads.unbind(0))
    predicted, y, g, branch, norm = flat((predicted, y, g, branch, norm))
    if y.numel():
        _backward_kernel[(y.numel() // y.shape[-1],)](
            dy, d_predicted, dg, d_branch, upstream, predicted, y, g, branch, norm, inverses, y.shape[-1],
            ACTIVE=active, K=len(upstream), **tiles(BACKWARD, y, predicted, branch),
        )  # fmt: skip
    if norm_grad and branch is not None:
        sum_columns(_norm_sums_kernel, d_norm, branch, (upstream, branch, inverses), K=len(upstream))


@correct.gradient
def _(
    d_new: Tensor, _inverses: None, *, predicted: list[Tensor], y: Tensor, g: Tensor, branch: Tensor | None,
    norm: Tensor | None, inverses: Tensor, active: int, needs: set[str],
) -> Gradients:  # fmt: skip
    dy, d_active, dg, d_branch, d_norm = correct_backward(
        d_new, blocks_of(predicted)[active], y, g, branch, norm, inverses, active, "norm" in needs
    )
    d_blocks = [grad.to(predicted[0].dtype) for grad in d_new.unbind(0)]  # as they came, but for the active one's
    d_blocks[active] = d_active
    return {
        "predicted": [torch.stack(d_blocks)] if len(predicted) == 1 else d_blocks,
        "y": dy,
        "g": dg,
        "branch": None if branch is None else d_branch,
        "norm": d_norm.to(norm.dtype) if "norm" in needs and norm is not None else None,
    }
