"""Triton kernels that mix a token's K blocks with coefficients of its own: one pass forward, one backward.

A program takes one token: it reads the K² + K coefficients once and walks through the d columns. With the upstream
gradients G, and ⟨·,·⟩ the sum over a token's columns:

    forward     x_newⁱ = Σⱼ Mᵢⱼ xʲ + gᵢ y
    backward    dxʲ = Σᵢ Mᵢⱼ Gⁱ,    dy = Σᵢ gᵢ Gⁱ,    dMᵢⱼ = ⟨Gⁱ, xʲ⟩,    dgᵢ = ⟨Gⁱ, y⟩

Arithmetic is float32. A token's sums are kept in registers by the one program that writes them, so results are the
same bit for bit from run to run. Where y is None, it and g are left out.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import Config, flat, vector_width

# A single warp adds up a token's K² + K sums without waiting for others.
FORWARD = Config(warps=2, vectors=1)
BACKWARD = Config(warps=1, vectors=1)


@triton.jit
def _load(pointer, start, lanes, mask):
    return tl.load(pointer + start + lanes, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_numbers(pointer, start, COUNT: tl.constexpr):
    numbers = ()
    for k in tl.static_range(COUNT):
        numbers = numbers + (tl.load(pointer + start + k),)
    return numbers


@triton.jit
def _forward_kernel(outs, xs, y, M, g, d, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    m = _load_numbers(M, token * (K * K), K * K)
    if y is not None:
        weights = _load_numbers(g, token * K, K)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        x = ()
        for j in tl.static_range(K):
            x = x + (_load(xs[j], start, lanes, mask),)
        if y is not None:
            total = _load(y, start, lanes, mask)
        for i in tl.static_range(K):
            row = m[i * K] * x[0]
            for j in tl.static_range(1, K):
                row += m[i * K + j] * x[j]
            if y is not None:
                row += weights[i] * total
            tl.store(outs[i] + start + lanes, row.to(outs[i].dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dxs, dy, dM, dg, grads, xs, y, M, g, d, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    # A row is one thread's vector, so that sums over rows stay within threads until the very end.
    lanes = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m = _load_numbers(M, token * (K * K), K * K)
    sums = ()
    for _ in tl.static_range(K * K):
        sums = sums + (tl.zeros([BLOCK // WIDTH], tl.float32),)
    y_sums = ()
    if y is not None:
        weights = _load_numbers(g, token * K, K)
        for _ in tl.static_range(K):
            y_sums = y_sums + (tl.zeros([BLOCK // WIDTH], tl.float32),)

    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        grad = ()
        x = ()
        for i in tl.static_range(K):
            grad = grad + (_load(grads[i], start, lanes, mask),)
        for j in tl.static_range(K):
            x = x + (_load(xs[j], start, lanes, mask),)

        new_sums = ()
        for i in tl.static_range(K):
            for j in tl.static_range(K):
                new_sums = new_sums + (sums[i * K + j] + tl.sum(grad[i] * x[j], axis=1),)
        sums = new_sums
        for j in tl.static_range(K):
            dx = m[j] * grad[0]
            for i in tl.static_range(1, K):
                dx += m[i * K + j] * grad[i]
            tl.store(dxs[j] + start + lanes, dx.to(dxs[j].dtype.element_ty), mask=mask)

        if y is not None:
            total = _load(y, start, lanes, mask)
            new_y_sums = ()
            for i in tl.static_range(K):
                new_y_sums = new_y_sums + (y_sums[i] + tl.sum(grad[i] * total, axis=1),)
            y_sums = new_y_sums
            d_total = weights[0] * grad[0]
            for i in tl.static_range(1, K):
                d_total += weights[i] * grad[i]
            tl.store(dy + start + lanes, d_total.to(dy.dtype.element_ty), mask=mask)

    for k in tl.static_range(K * K):
        tl.store(dM + token * (K * K) + k, tl.sum(sums[k]))
    if y is not None:
        for i in tl.static_range(K):
            tl.store(dg + token * K + i, tl.sum(y_sums[i]))


def forward(outs: Sequence[Tensor], xs: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None) -> None:
    """Fill `outs`, which are contiguous, with the new blocks. M and g are float32."""
    xs, (y, M, g) = flat(xs), flat((y, M, g))
    K, tokens, d = _sizes(xs, M)
    block = vector_width(xs[0], y) * 32 * FORWARD.warps * FORWARD.vectors
    if tokens:
        with torch.cuda.device_of(M):
            _forward_kernel[(tokens,)](tuple(outs), xs, y, M, g, d, K=K, BLOCK=block, num_warps=FORWARD.warps)


def backward(
    dxs: Sequence[Tensor],
    dy: Tensor | None,
    dM: Tensor,
    dg: Tensor | None,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    y: Tensor | None,
    M: Tensor,
    g: Tensor | None,
) -> None:
    """Fill the gradients `dxs`, `dy`, `dM` and `dg`, which are contiguous, from the upstream `grads`."""
    grads, xs, (y, M, g) = flat(grads), flat(xs), flat((y, M, g))
    K, tokens, d = _sizes(xs, M)
    width = vector_width(xs[0], y)
    block = width * 32 * BACKWARD.warps * BACKWARD.vectors
    if tokens:
        with torch.cuda.device_of(M):
            _backward_kernel[(tokens,)](
                tuple(dxs),
                dy,
                dM,
                dg,
                grads,
                xs,
                y,
                M,
                g,
                d,
                K=K,
                BLOCK=block,
                WIDTH=width,
                num_warps=BACKWARD.warps,
            )


def _sizes(xs: Sequence[Tensor], M: Tensor) -> tuple[int, int, int]:
    """Blocks, tokens, and columns of a block."""
    K = len(xs)
    return K, M.numel() // (K * K), xs[0].shape[-1]
