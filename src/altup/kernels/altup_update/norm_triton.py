"""Triton kernels of Algorithm 1's update and, in the same pass, the norm before the next layer.

A program holds whole rows. With a the active block, b the next layer's, s = x_newᵇ, r = 1 / √(mean(s²) + ε), w the
norm's weight, n the gradient of its result and A that of s as the next layer's residual, backward first

    Gᵇ ← Gᵇ + A + r·(n·w − s·r²·mean(n·w·s)),     d_w = Σ n·s·r,

and then all as in `triton.py`. s is computed again from what the sums of the coefficients read anyway.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.add_norm.triton import store_normed, sum_columns
from altup.kernels.altup_update.triton import coefficient_gradients
from altup.kernels.launch import flat, multiprocessors

TILE = 2048  # numbers of a block that a program reads at a time forward
BACKWARD_TILE = 1024
PROGRAMS_PER_SM = 4  # as many as registers allow at once
VECTOR = 8


def forward(
    outs: Sequence[Tensor], normed: Tensor, rms: Tensor, xs: Sequence[Tensor], y: Tensor, residual: Tensor,
    P: Tensor, g: Tensor, weight: Tensor, active: int, following: int, eps: float, q: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `outs` with the new blocks, `normed` with the norm of block `following`, `rms` with r of its rows; with
    q and `scale` these instead of `normed`, in 8 bits."""
    xs, (y, residual) = flat(xs), flat((y, residual))
    rows, d, block, tile = _sizes(y, TILE)
    forward_kernel[(triton.cdiv(rows, tile),)](
        tuple(outs), normed, rms, q, scale, xs, y, residual, P, g, weight, active, rows, eps, d**0.5,
        K=len(xs), NEXT=following, D=d, BLOCK=block, ROWS=tile, LOW=q is not None,
        num_warps=_warps(block * tile, 16),
    )  # fmt: skip


def backward(
    dxs: Sequence[Tensor], dy: Tensor, dP: Tensor, dg: Tensor, d_weight: Tensor, grads: Sequence[Tensor],
    d_again: Tensor, d_normed: Tensor, rms: Tensor, xs: Sequence[Tensor], y: Tensor, residual: Tensor, P: Tensor,
    g: Tensor, weight: Tensor, active: int, following: int,
) -> None:  # fmt: skip
    grads, xs, (y, residual, d_again, d_normed) = flat(grads), flat(xs), flat((y, residual, d_again, d_normed))
    rows, d, block, tile = _sizes(y, BACKWARD_TILE)
    K = len(xs)
    programs = min(triton.cdiv(rows, tile), PROGRAMS_PER_SM * multiprocessors(y.device))
    partials = rms.new_empty(K, K + 1, programs)
    sums = rms.new_empty(programs, d)
    backward_kernel[(programs,)](
        tuple(dxs), dy, partials, sums, grads, d_again, d_normed, rms, xs, y, residual, P, g, weight, active, rows,
        K=K, NEXT=following, D=d, BLOCK=block, ROWS=tile, V=VECTOR, num_warps=_warps(block * tile, 8),
    )  # fmt: skip
    coefficient_gradients(dP, dg, partials, P, g, active)
    sum_columns(d_weight, sums)


def _sizes(x: Tensor, numbers: int) -> tuple[int, int, int, int]:
    """Rows, their width and the power of two above it, and the rows of a tile."""
    d = x.shape[-1]
    block = max(VECTOR, triton.next_power_of_2(d))
    return x.numel() // d, d, block, max(1, numbers // block)


def _warps(numbers: int, a_thread: int) -> int:
    return min(16, max(4, numbers // (32 * a_thread)))


@triton.jit
def _matrix(P, g, active, K: tl.constexpr):
    """M = P − g ⊗ P[active], row by row, and g, all float32."""
    M = ()
    weights = ()
    for i in tl.static_range(K):
        g_i = tl.load(g + i).to(tl.float32)
        weights = weights + (g_i,)
        for j in tl.static_range(K):
            M = M + (tl.load(P + i * K + j).to(tl.float32) - g_i * tl.load(P + active * K + j).to(tl.float32),)
    return M, weights


@triton.jit(do_not_specialize=["active"])
def forward_kernel(
    outs, normed, rms, q, scale, xs, y, residual, P, g, weight, active, rows, eps, root,
    K: tl.constexpr, NEXT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    M, weights = _matrix(P, g, active, K)
    total = tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    x = ()
    for j in tl.static_range(K):
        x = x + (tl.load(xs[j] + offset, mask=inside, other=0.0).to(tl.float32),)
    for i in tl.static_range(K):
        new = weights[i] * total
        for j in tl.static_range(K):
            new += M[i * K + j] * x[j]
        rounded = new.to(outs[i].dtype.element_ty)
        tl.store(outs[i] + offset, rounded, mask=inside)
        if i == NEXT:
            store_normed(normed, rms, q, scale, rounded, weight, row, column, rows, eps, root, D, LOW)


@triton.jit(do_not_specialize=["active"])
def backward_kernel(
    dxs, dy, partials, sums, grads, d_again, d_normed, rms, xs, y, residual, P, g, weight, active, rows,
    K: tl.constexpr, NEXT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Tiles are [ROWS, BLOCK/V, V], so that sums over V stay within threads until the very end."""
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK // V)[:, None] * V + tl.arange(0, V)[None, :]
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :, :]
    M, weights = _matrix(P, g, active, K)
    dots = ()
    for _ in tl.static_range(K * (K + 1)):
        dots = dots + (tl.zeros([ROWS, BLOCK // V], tl.float32),)
    acc = tl.zeros([ROWS, BLOCK // V, V], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offset = row[:, None, None] * D + column[None, :, :]
        inside = (row < rows)[:, None, None] & (column < D)[None, :, :]
        x = ()
        for j in tl.static_range(K):
            x = x + (tl.load(xs[j] + offset, mask=inside, other=0.0).to(tl.float32),)
        total = tl.load(y + offset, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
        n = tl.load(d_normed + offset, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(d_again + offset, mask=inside, other=0.0).to(tl.float32)
        grad = ()
        for i in tl.static_range(K):
            grad = grad + (tl.load(grads[i] + offset, mask=inside, other=0.0).to(tl.float32),)
        r = tl.load(rms + row, mask=row < rows, other=0.0)[:, None, None]

        s = weights[NEXT] * total
        for j in tl.static_range(K):
            s += M[NEXT * K + j] * x[j]
        unit = s.to(dxs[0].dtype.element_ty).to(tl.float32) * r
        acc += n * unit
        n *= w
        mean = (tl.sum(tl.sum(n * unit, 2), 1) / D)[:, None, None]
        following += grad[NEXT] + r * (n - unit * mean)
        new_grad = ()
        for i in tl.static_range(K):
            new_grad = new_grad + (following if i == NEXT else grad[i],)
        grad = new_grad

        x = x + (total,)
        new_dots = ()
        for i in tl.static_range(K):
            for j in tl.static_range(K + 1):
                new_dots = new_dots + (dots[i * (K + 1) + j] + tl.sum(grad[i] * x[j], 2),)
        dots = new_dots
        for j in tl.static_range(K):
            dx = M[j] * grad[0]
            for i in tl.static_range(1, K):
                dx += M[i * K + j] * grad[i]
            tl.store(dxs[j] + offset, dx.to(dxs[j].dtype.element_ty), mask=inside)
        d_total = weights[0] * grad[0]
        for i in tl.static_range(1, K):
            d_total += weights[i] * grad[i]
        tl.store(dy + offset, d_total.to(dy.dtype.element_ty), mask=inside)

    for k in tl.static_range(K * (K + 1)):
        tl.store(partials + k * programs + tl.program_id(0), tl.sum(tl.sum(dots[k], 1), 0))
    tl.store(sums + tl.program_id(0) * D + column, tl.sum(acc, 0), mask=column < D)
