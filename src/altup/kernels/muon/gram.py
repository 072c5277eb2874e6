"""Newton-Schulz iterations on Gram matrices, by a Triton kernel that computes half of a symmetric product.

Of X [m, k] with m ≤ k, and polynomials p(R) = a + b·R + c·R² of R = X·Xᵀ, the iterations X ← p(X·Xᵀ)·X are

    Z = p(R),   Q ← Q·Z,   R ← R·Z²,        and Q·X in the end.

All these [m, m] matrices are polynomials of the first R, so they are symmetric and commute. With both triangles
computed as one, five iterations take 0.6 of the operations for m = k, and half of them for k = 2.7·m.

Rounding is the price: R holds squares of singular values, and what is lost of the small ones in one iteration is
magnified by the next. So Q·X and its R are computed anew after `RESTART` iterations, and numbers are float16, not
bfloat16. On matrices of very unequal singular values the result is then nearer to the float64 definition than five
plain iterations in bfloat16 are; without either it is useless there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.muon.reference import ITERATIONS, NEWTON_SCHULZ

RESTART = 3
TILE, STEP = 128, 64  # of the result, and of the sums
WARPS, STAGES = 4, 3
# With fewer programs than this, of a large tile each, a GPU is not full: tiles are then small.
FEW_PROGRAMS = 240
SMALL_TILE, SMALL_WARPS = 64, 4


@triton.jit
def _symmetric_kernel(
    left, right, added, out, m, k, alpha, beta, gamma,
    TALL: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out = alpha·left·rightᵀ + beta·added + gamma·1 [n, m, m], which is symmetric, from left and right [n, m, k].

    TALL: they are [n, k, m]. A program computes a tile (i, j) with i ≥ j and writes it as (j, i) too, of a tile on
    the diagonal the lower triangle. EVEN: m and k are whole tiles.
    """
    tiles = tl.cdiv(m, TILE)
    i, j, n = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    if i < j:
        return
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    step = tl.arange(0, STEP)
    if TALL:
        at_left = left + n * m * k + step[:, None] * m + rows[None, :]
        at_right = right + n * m * k + step[:, None] * m + columns[None, :]
    else:
        at_left = left + n * m * k + rows[:, None] * k + step[None, :]
        at_right = right + n * m * k + columns[:, None] * k + step[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, k, STEP):
        if EVEN:
            a, b = tl.load(at_left), tl.load(at_right)
        elif TALL:
            inside = (start + step < k)[:, None]
            a = tl.load(at_left, mask=inside & (rows < m)[None, :], other=0.0)
            b = tl.load(at_right, mask=inside & (columns < m)[None, :], other=0.0)
        else:
            inside = (start + step < k)[None, :]
            a = tl.load(at_left, mask=inside & (rows < m)[:, None], other=0.0)
            b = tl.load(at_right, mask=inside & (columns < m)[:, None], other=0.0)
        if TALL:
            total = tl.dot(tl.trans(a), b, total)
            at_left += STEP * m
            at_right += STEP * m
        else:
            total = tl.dot(a, tl.trans(b), total)
            at_left += STEP
            at_right += STEP
    total *= alpha
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    offset, mirrored = rows[:, None] * m + columns[None, :], columns[:, None] * m + rows[None, :]
    if ADDS:
        total += beta * tl.load(added + n * m * m + offset, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(rows[:, None] == columns[None, :], gamma, 0.0)
    result = total.to(out.dtype.element_ty)
    out += n * m * m
    if i > j:
        tl.store(out + offset, result, mask=inside)
        tl.store(out + mirrored, tl.trans(result), mask=(columns < m)[:, None] & (rows < m)[None, :])
    else:  # which is not symmetric to the last bit, and the next products would magnify that
        tl.store(out + offset, result, mask=inside & (rows[:, None] >= columns[None, :]))
        tl.store(out + mirrored, tl.trans(result), mask=inside & (columns[:, None] < rows[None, :]))


def symmetric_product(
    left: Tensor, right: Tensor, *, tall: bool = False, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """alpha·left·rightᵀ + beta·right + gamma·1, [n, m, m], of matrices [n, m, k] whose product is symmetric.

    With `tall` they are [n, k, m], and it is alpha·leftᵀ·right. `right` can be added where k = m. `out` is where
    the result goes, if it is given.
    """
    n, m, k = left.shape
    if tall:
        m, k = k, m
    tiles = triton.cdiv(m, TILE)
    few = n * tiles * (tiles + 1) // 2 < FEW_PROGRAMS
    tile = min(SMALL_TILE if few else TILE, max(16, triton.next_power_of_2(m)))
    step = min(STEP, max(16, triton.next_power_of_2(k)))
    if out is None:
        out = left.new_empty(n, m, m)
    with torch.cuda.device_of(out):
        _symmetric_kernel[triton.cdiv(m, tile) ** 2, n](
            left, right, right, out, m, k, alpha, beta, gamma, TALL=tall, ADDS=bool(beta or gamma),
            EVEN=m % tile == 0 and k % step == 0, TILE=tile, STEP=step,
            num_warps=SMALL_WARPS if few else WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


def iterate_gram(*stacks: Tensor) -> list[Tensor]:
    """As `iterate_newton_schulz`: of stacks of matrices [n, rows, columns] whose singular values are at most 1.

    Stacks of several shapes are taken together: the shorter sides of all matrices are as long, and so are their
    Gram matrices.
    """
    a, b, c = NEWTON_SCHULZ
    x = list(stacks)
    grams, factor = _grams(x), None
    for iteration in range(1, ITERATIONS + 1):
        polynomial = symmetric_product(grams, grams, alpha=c, beta=b, gamma=a)
        factor = polynomial if factor is None else symmetric_product(factor, polynomial)
        if iteration in (RESTART, ITERATIONS):
            parts = factor.split([len(one) for one in x])
            x = [torch.bmm(p, f) if _is_tall(p) else torch.bmm(f, p) for p, f in zip(x, parts, strict=True)]
            factor = None
            grams = _grams(x) if iteration < ITERATIONS else grams
        else:
            grams = symmetric_product(symmetric_product(grams, polynomial), polynomial)
    return x


def _grams(stacks: list[Tensor]) -> Tensor:
    """[all matrices, m, m]."""
    m = min(stacks[0].shape[1:])
    out = stacks[0].new_empty(sum(map(len, stacks)), m, m)
    for x, offset in zip(stacks, out.split([len(x) for x in stacks]), strict=True):
        symmetric_product(x, x, tall=_is_tall(x), out=offset)
    return out


def _is_tall(x: Tensor) -> bool:
    return x.shape[1] > x.shape[2]
