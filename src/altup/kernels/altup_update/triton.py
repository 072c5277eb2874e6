"""Triton kernels of Algorithm 1's update: one pass over the wide state forward, one backward.

The elements of a block are independent of one another, so a block is a flat array of n numbers whatever its shape.
With M = P − g ⊗ P[a], y = y + residual and the upstream gradients G:

    forward     x_newⁱ = Σⱼ Mᵢⱼ xʲ + gᵢ y
    backward    dxʲ = Σᵢ Mᵢⱼ Gⁱ,    dy = Σᵢ gᵢ Gⁱ,    D = [⟨Gⁱ, xʲ⟩ | ⟨Gⁱ, y⟩]  (K × K+1 sums over all n)
                dP = D − [i = a] Σₘ gₘ Dₘ,    dgᵢ = ⟨Gⁱ, y⟩ − Σⱼ Pₐⱼ Dᵢⱼ

Arithmetic is float32. The sums D are kept in registers by programs that walk through the arrays, written once by
each, and added up in a fixed order: results are the same bit for bit from run to run.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import Config, ceil_div, flat, multiprocessors, power_of_two, vector_width
from altup.kernels.operators import Gradients, operator

# By K; the backward kernel holds K² + K sums, so a larger K leaves room for fewer programs. As many as fit at once
# is best: a program that starts after the others have ended has the GPU nearly to itself.
FORWARD = {K: Config(warps=4, vectors=1) for K in range(1, 9)}
BACKWARD = {
    1: Config(warps=4, vectors=1, programs_per_sm=12),
    2: Config(warps=4, vectors=1, programs_per_sm=9),
    3: Config(warps=1, vectors=1, programs_per_sm=25),
    4: Config(warps=1, vectors=1, programs_per_sm=16),
    5: Config(warps=1, vectors=1, programs_per_sm=16),
    6: Config(warps=4, vectors=1, programs_per_sm=2),
    7: Config(warps=4, vectors=1, programs_per_sm=2),
    8: Config(warps=4, vectors=1, programs_per_sm=2),
}
COEFFICIENTS = Config(warps=16, vectors=8)


@triton.jit
def _load(pointer, start, lanes, mask):
    return tl.load(pointer + start + lanes, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["active"])
def _forward_kernel(outs, xs, y, residual, P, g, active, n, K: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    mask = lanes < n - start
    total = _load(y, start, lanes, mask)
    if residual is not None:
        total += _load(residual, start, lanes, mask)
    x = ()
    of_active = ()
    for j in tl.static_range(K):
        x = x + (_load(xs[j], start, lanes, mask),)
        of_active = of_active + (tl.load(P + active * K + j),)
    for i in tl.static_range(K):
        g_i = tl.load(g + i)
        row = g_i * total
        for j in tl.static_range(K):
            row += (tl.load(P + i * K + j) - g_i * of_active[j]) * x[j]
        tl.store(outs[i] + start + lanes, row.to(outs[i].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["active"])
def _backward_kernel(
    dxs,
    dy,
    partials,
    grads,
    xs,
    y,
    residual,
    P,
    g,
    active,
    n,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    # A row is one thread's vector, so that sums over rows stay within threads until the very end.
    lanes = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    M = ()
    weights = ()
    sums = ()
    for i in tl.static_range(K):
        g_i = tl.load(g + i)
        weights = weights + (g_i,)
        for j in tl.static_range(K):
            M = M + (tl.load(P + i * K + j) - g_i * tl.load(P + active * K + j),)
        for _ in tl.static_range(K + 1):
            sums = sums + (tl.zeros([BLOCK // WIDTH], tl.float32),)

    for chunk in tl.range(first, tl.cdiv(n, BLOCK), programs, num_stages=STAGES):
        start = tl.cast(chunk, tl.int64) * BLOCK
        mask = lanes < n - start
        grad = ()
        x = ()
        for i in tl.static_range(K):
            grad = grad + (_load(grads[i], start, lanes, mask),)
        for j in tl.static_range(K):
            x = x + (_load(xs[j], start, lanes, mask),)
        total = _load(y, start, lanes, mask)
        if residual is not None:
            total += _load(residual, start, lanes, mask)
        x = x + (total,)

        new_sums = ()
        for i in tl.static_range(K):
            for j in tl.static_range(K + 1):
                product = tl.sum(grad[i] * x[j], axis=1)
                new_sums = new_sums + (sums[i * (K + 1) + j] + product,)
        sums = new_sums

        for j in tl.static_range(K):
            dx = M[j] * grad[0]
            for i in tl.static_range(1, K):
                dx += M[i * K + j] * grad[i]
            tl.store(dxs[j] + start + lanes, dx.to(dxs[j].dtype.element_ty), mask=mask)
        d_total = weights[0] * grad[0]
        for i in tl.static_range(1, K):
            d_total += weights[i] * grad[i]
        tl.store(dy + start + lanes, d_total.to(dy.dtype.element_ty), mask=mask)

    for k in tl.static_range(K * (K + 1)):
        tl.store(partials + k * programs + first, tl.sum(sums[k]))


@triton.jit(do_not_specialize=["active", "programs"])
def _coefficients_kernel(
    dP,
    dg,
    partials,
    P,
    g,
    active,
    programs,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """dP and dg from the partial sums [K, K+1, programs]."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    inside = (i < K)[:, None] & (j <= K)[None, :]
    pointers = partials + (i[:, None] * (K + 1) + j[None, :]) * programs
    sums = tl.zeros([ROWS, COLUMNS, CHUNK], tl.float32)
    for start in range(0, programs, CHUNK):
        program = start + tl.arange(0, CHUNK)
        mask = inside[:, :, None] & (program < programs)[None, None, :]
        sums += tl.load(pointers[:, :, None] + program[None, None, :], mask=mask, other=0.0)
    D = tl.sum(sums, axis=2)
    g_i = tl.load(g + i, mask=i < K, other=0.0).to(tl.float32)
    of_active = tl.sum(g_i[:, None] * D, axis=0)
    d_P = D - tl.where((i == active)[:, None], of_active[None, :], 0.0)
    tl.store(dP + i[:, None] * K + j[None, :], d_P, mask=inside & (j < K)[None, :])
    weights = tl.where(j == K, 1.0, -tl.load(P + active * K + j, mask=j < K, other=0.0).to(tl.float32))
    tl.store(dg + i, tl.sum(D * weights[None, :], axis=1), mask=i < K)


@operator("altup::update")
def update(
    state: Sequence[Tensor], y: Tensor, residual: Tensor | None, P: Tensor, g: Tensor, active: int
) -> Iterator[list[Tensor]]:
    """state: K tensors [..., d] or one [K, ..., d], and the new one, like the gradient, is of the same kind: the
    kernels write where the result is wanted. y, residual: [..., d]; P: [K, K], g: [K], float32."""
    new = like(state)
    yield new
    outs, xs = blocks(new, y.dim()), flat(blocks(state, y.dim()))
    y, residual, P, g = flat((y, residual, P, g))
    K, n = len(xs), y.numel()
    config = FORWARD[K]
    block = vector_width(xs[0], y) * 32 * config.warps * config.vectors
    if n:
        _forward_kernel[(ceil_div(n, block),)](
            tuple(outs), xs, y, residual, P, g, active, n, K=K, BLOCK=block, num_warps=config.warps
        )


@operator("altup::update_backward")
def update_backward(
    grads: Sequence[Tensor], state: Sequence[Tensor], y: Tensor, residual: Tensor | None, P: Tensor, g: Tensor,
    active: int,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of the state (a list like it), of y, P and g."""
    d_state, (dy, dP, dg) = like(state), like((y, P, g))
    yield d_state, dy, dP, dg
    dxs, upstream, xs = (blocks(tensors, y.dim()) for tensors in (d_state, grads, state))
    upstream, xs, (y, residual, P, g) = flat(upstream), flat(xs), flat((y, residual, P, g))
    K, n = len(xs), y.numel()
    config = BACKWARD[K]
    width = vector_width(xs[0], y)
    block = width * 32 * config.warps * config.vectors
    programs = max(1, min(ceil_div(n, block), config.programs_per_sm * multiprocessors(y.device)))
    partials = torch.empty(K, K + 1, programs, device=y.device, dtype=torch.float32)
    _backward_kernel[(programs,)](
        tuple(dxs), dy, partials, upstream, xs, y, residual, P, g, active, n,
        K=K, BLOCK=block, WIDTH=width, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    coefficient_gradients(dP, dg, partials, P, g, active)


@update.gradient
def _(
    d_new: list[Tensor],
    *,
    state: list[Tensor],
    y: Tensor,
    residual: Tensor | None,
    P: Tensor,
    g: Tensor,
    active: int,
) -> Gradients:
    d_state, dy, dP, dg = update_backward(d_new, state, y, residual, P, g, active)
    return {"state": d_state, "y": dy, "residual": None if residual is None else dy, "P": dP, "g": dg}


def like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def blocks(state: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """The K blocks of either kind of state, which have `dim` dimensions."""
    return state[0].unbind(0) if state[0].dim() > dim else state


def coefficient_gradients(dP: Tensor, dg: Tensor, partials: Tensor, P: Tensor, g: Tensor, active: int) -> None:
    """Fill `dP` and `dg` from the partial sums [K, K+1, programs]."""
    K, _, programs = partials.shape
    rows, columns = power_of_two(K), power_of_two(K + 1)
    _coefficients_kernel[(1,)](
        dP, dg, partials, P, g, active, programs, K=K, ROWS=rows, COLUMNS=columns,
        CHUNK=COEFFICIENTS.vectors * 4 * 32 * COEFFICIENTS.warps // (rows * columns), num_warps=COEFFICIENTS.warps,
    )  # fmt: skip
