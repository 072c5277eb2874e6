"""Triton kernels of the correction: all blocks, with the branch normed and added to all but block 0.

With δ = y − x̂ᵃ, the branch p, r = rms(p), the norm's scale w, the upstream gradients G and q = Σ_{i ≥ 1} Gⁱ:

    forward     x_newⁱ = x̂ⁱ + gᵢ δ, and for i ≥ 1 also w ∘ p / r
    backward    dgᵢ = ⟨Gⁱ, δ⟩,    dy = Σ gᵢ Gⁱ,    dx̂ᵃ = Gᵃ − dy,    dp = (w ∘ q − p ⟨w ∘ q, p⟩ / (r² d)) / r

The other predicted blocks' gradients are G itself. That of w is a sum over tokens, by another kernel.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import (
    COLUMNS,
    column_sums,
    columns_of,
    load,
    load_blocks,
    load_numbers,
    load_sum,
    store,
    tile,
    tiles,
    zeros,
)
from altup.kernels.launch import Config, flat

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


def forward(
    outs: Sequence[Tensor],
    inverses: Tensor,
    predicted: Sequence[Tensor],
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    active: int,
    eps: float,
) -> None:
    """Fill the new blocks and, where there is a branch, 1 / rms(branch): [...], all contiguous."""
    predicted, (y, g, branch, norm) = flat(predicted), flat((y, g, branch, norm))
    tokens = y.numel() // y.shape[-1]
    if tokens:
        _forward_kernel[(tokens,)](
            tuple(outs), inverses, predicted, y, g, branch, norm, y.shape[-1], eps,
            ACTIVE=active, K=len(predicted), **tiles(FORWARD, y, predicted[0], branch),
        )  # fmt: skip


def backward(
    dy: Tensor,
    d_predicted: Tensor,
    dg: Tensor,
    d_branch: Tensor | None,
    grads: Sequence[Tensor],
    predicted: Tensor,
    y: Tensor,
    g: Tensor,
    branch: Tensor | None,
    norm: Tensor | None,
    inverses: Tensor,
    active: int,
) -> None:
    """Fill the gradients of y, x̂ᵃ (`predicted`), g and branch."""
    grads, (predicted, y, g, branch, norm) = flat(grads), flat((predicted, y, g, branch, norm))
    tokens = y.numel() // y.shape[-1]
    if tokens:
        _backward_kernel[(tokens,)](
            dy, d_predicted, dg, d_branch, grads, predicted, y, g, branch, norm, inverses, y.shape[-1],
            ACTIVE=active, K=len(grads), **tiles(BACKWARD, y, predicted, branch),
        )  # fmt: skip


def norm_sums(grads: Sequence[Tensor], branch: Tensor, inverses: Tensor) -> Tensor:
    """The gradient of the norm's scale: [d], float32."""
    grads, (branch, inverses) = flat(grads), flat((branch, inverses))
    sums, rows, launch = column_sums(branch)
    if launch:
        _norm_sums_kernel[launch](
            sums, grads, branch, inverses, branch.numel() // branch.shape[-1], rows, branch.shape[-1],
            K=len(grads), BLOCK=columns_of(branch), num_warps=COLUMNS.warps,
        )  # fmt: skip
    return sums.sum(dim=0)
