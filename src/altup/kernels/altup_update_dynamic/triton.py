"""Triton kernels that mix a token's K blocks with coefficients of its own: one pass forward, one backward.

A program takes one token: it reads its coefficients once and walks through the d columns. M has as many rows as
blocks come out, K or fewer. With the upstream gradients G, and ⟨·,·⟩ the sum over a token's columns:

    forward     x_newⁱ = Σⱼ Mᵢⱼ xʲ + gᵢ y
    backward    dxʲ = Σᵢ Mᵢⱼ Gⁱ,    dy = Σᵢ gᵢ Gⁱ,    dMᵢⱼ = ⟨Gⁱ, xʲ⟩,    dgᵢ = ⟨Gⁱ, y⟩

Arithmetic is float32. A token's sums are kept in registers by the one program that writes them, so results are the
same bit for bit from run to run. Without y there is no g either.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import Config, flat, vector_width
from altup.kernels.operators import Gradients, operator

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
def _forward_kernel(
    outs, xs, y, M, g, d, x_row, out_row, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    m = _load_numbers(M, token * (ROWS * K), ROWS * K)
    if y is not None:
        weights = _load_numbers(g, token * ROWS, ROWS)
    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        x = ()
        for j in tl.static_range(K):
            x = x + (_load(xs[j], token * x_row + column, lanes, mask),)
        if y is not None:
            total = _load(y, start, lanes, mask)
        for i in tl.static_range(ROWS):
            row = m[i * K] * x[0]
            for j in tl.static_range(1, K):
                row += m[i * K + j] * x[j]
            if y is not None:
                row += weights[i] * total
            tl.store(outs[i] + token * out_row + column + lanes, row.to(outs[i].dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dxs, dy, dM, dg, grads, xs, y, M, g, d, x_row, out_row,
    ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # A row is one thread's vector, so that sums over rows stay within threads until the very end.
    lanes = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    m = _load_numbers(M, token * (ROWS * K), ROWS * K)
    sums = ()
    for _ in tl.static_range(ROWS * K):
        sums = sums + (tl.zeros([BLOCK // WIDTH], tl.float32),)
    y_sums = ()
    if y is not None:
        weights = _load_numbers(g, token * ROWS, ROWS)
        for _ in tl.static_range(ROWS):
            y_sums = y_sums + (tl.zeros([BLOCK // WIDTH], tl.float32),)

    for column in range(0, d, BLOCK):
        start = token * d + column
        mask = lanes < d - column
        grad = ()
        x = ()
        for i in tl.static_range(ROWS):
            grad = grad + (_load(grads[i], token * out_row + column, lanes, mask),)
        for j in tl.static_range(K):
            x = x + (_load(xs[j], token * x_row + column, lanes, mask),)

        new_sums = ()
        for i in tl.static_range(ROWS):
            for j in tl.static_range(K):
                new_sums = new_sums + (sums[i * K + j] + tl.sum(grad[i] * x[j], axis=1),)
        sums = new_sums
        for j in tl.static_range(K):
            dx = m[j] * grad[0]
            for i in tl.static_range(1, ROWS):
                dx += m[i * K + j] * grad[i]
            tl.store(dxs[j] + token * x_row + column + lanes, dx.to(dxs[j].dtype.element_ty), mask=mask)

        if y is not None:
            total = _load(y, start, lanes, mask)
            new_y_sums = ()
            for i in tl.static_range(ROWS):
                new_y_sums = new_y_sums + (y_sums[i] + tl.sum(grad[i] * total, axis=1),)
            y_sums = new_y_sums
            d_total = weights[0] * grad[0]
            for i in tl.static_range(1, ROWS):
                d_total += weights[i] * grad[i]
            tl.store(dy + start + lanes, d_total.to(dy.dtype.element_ty), mask=mask)

    for k in tl.static_range(ROWS * K):
        tl.store(dM + token * (ROWS * K) + k, tl.sum(sums[k]))
    if y is not None:
        for i in tl.static_range(ROWS):
            tl.store(dg + token * ROWS + i, tl.sum(y_sums[i]))


@operator("altup::mix")
def mix(
    state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None, dim: int
) -> Iterator[list[Tensor]]:
    """state: K tensors [..., d], or one in which they are stacked along `dim`, 0 or -2, and so is what comes back;
    y: [..., d]; M: [..., rows, K], g: [..., rows], float32. y and g are given both or not at all."""
    rows = M.shape[-2]
    new = _like(state, M, dim)
    yield new
    xs, x_row = _apart(state, M, dim)
    outs, out_row = _apart(new, M, dim)
    y, M, g = flat((y, M, g))
    d = xs[0].shape[-1]
    block = vector_width(xs[0], y) * 32 * FORWARD.warps * FORWARD.vectors
    if M.numel():
        _forward_kernel[(M.numel() // (rows * len(xs)),)](
            outs, xs, y, M, g, d, x_row, out_row, ROWS=rows, K=len(xs), BLOCK=block, num_warps=FORWARD.warps
        )


@operator("altup::mix_backward")
def mix_backward(
    grads: Sequence[Tensor], state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None, dim: int
) -> Iterator[tuple[list[Tensor], Tensor, Tensor, Tensor]]:
    """The gradients of the state (a list like it), of M, y and g; what is not given has an empty one."""
    d_state, dM = [x.new_empty(x.shape) for x in state], M.new_empty(M.shape)
    dy, dg = (M.new_empty(0) if t is None else t.new_empty(t.shape) for t in (y, g))
    yield d_state, dM, dy, dg
    (xs, x_row), (upstream, out_row) = _apart(state, M, dim), _apart(grads, M, dim)
    dxs, _ = _apart(d_state, M, dim)
    y, M, g = flat((y, M, g))
    rows, K, d = M.shape[-2], len(xs), xs[0].shape[-1]
    width = vector_width(xs[0], y)
    if M.numel():
        _backward_kernel[(M.numel() // (rows * K),)](
            dxs, dy, dM, dg, upstream, xs, y, M, g, d, x_row, out_row, ROWS=rows, K=K, WIDTH=width,
            BLOCK=width * 32 * BACKWARD.warps * BACKWARD.vectors, num_warps=BACKWARD.warps,
        )  # fmt: skip


@mix.gradient
def _(
    d_new: list[Tensor], *, state: list[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None, dim: int
) -> Gradients:
    d_state, dM, dy, dg = mix_backward(d_new, state, y, M, g, dim)
    return {"state": d_state, "M": dM} | ({} if y is None else {"y": dy, "g": dg})


def _like(state: Sequence[Tensor], M: Tensor, dim: int) -> list[Tensor]:
    """Memory for as many blocks as M has rows, stacked as the state is."""
    x, rows = state[0], M.shape[-2]
    if x.dim() < M.dim():
        return [x.new_empty(x.shape) for _ in range(rows)]
    shape = list(x.shape)
    shape[dim] = rows
    return [x.new_empty(shape)]


def _apart(state: Sequence[Tensor], M: Tensor, dim: int) -> tuple[tuple[Tensor, ...], int]:
    """The blocks of either kind of state, and how far apart their tokens are."""
    x = state[0].contiguous()
    if x.dim() < M.dim():
        return flat(state), x.shape[-1]
    return x.unbind(dim), x.stride(dim - 1) if dim else x.shape[-1]
