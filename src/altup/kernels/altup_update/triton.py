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

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.altup_update import relaunch
from altup.kernels.altup_update.relaunch import COMPILED, MOST_KINDS, Updated, addresses_of, kind_of, launcher
from altup.kernels.launch import Config, flat, multiprocessors, vector_width

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


def forward(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    y: Tensor,
    residual: Tensor | None,
    P: Tensor,
    g: Tensor,
    active: int,
) -> None:
    """Fill `outs`, which are contiguous, with the new blocks. P and g are float32."""
    K, n = len(xs), y.numel()
    kind = kind_of(xs, y, residual, config := FORWARD[K])
    if kind in COMPILED and addresses_of((*outs, *xs, y, P, g), residual):
        launch, block = COMPILED[kind]
        launch(tuple(outs), tuple(xs), y, residual, P, g, active, n, K, block)
    elif n:
        xs, (y, P, g) = flat(xs), flat((y, P, g))
        residual = None if residual is None else residual.contiguous()
        block = vector_width(xs[0], y) * 32 * config.warps * config.vectors
        grid = (triton.cdiv(n, block), 1, 1)
        with torch.cuda.device_of(y):
            compiled = _forward_kernel[grid](
                tuple(outs), xs, y, residual, P, g, active, n, K=K, BLOCK=block, num_warps=config.warps
            )
        interpreted = compiled is None
        if not interpreted and n % 16 == 0 and addresses_of((*outs, *xs, y, P, g), residual):
            if len(COMPILED) == MOST_KINDS:
                COMPILED.clear()
            COMPILED[kind] = launcher(compiled, grid), block


def begin_chain(xs: Sequence[Tensor], y: Tensor, update: Any, active: int) -> Updated | None:
    """See `relaunch.begin_chain`."""
    return relaunch.begin_chain(xs, y, update, active, FORWARD.get(len(xs)))


def backward(
    dxs: Sequence[Tensor],
    dy: Tensor,
    dP: Tensor,
    dg: Tensor,
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    y: Tensor,
    residual: Tensor | None,
    P: Tensor,
    g: Tensor,
    active: int,
) -> None:
    """Fill the gradients `dxs`, `dy` (that of `residual` too), `dP` and `dg` from the upstream `grads`."""
    grads, xs, (y, P, g) = flat(grads), flat(xs), flat((y, P, g))
    residual = None if residual is None else residual.contiguous()
    K, n = len(xs), y.numel()
    config = BACKWARD[K]
    width = vector_width(xs[0], y)
    block = width * 32 * config.warps * config.vectors
    programs = max(1, min(triton.cdiv(n, block), config.programs_per_sm * multiprocessors(y.device)))
    partials = torch.empty(K, K + 1, programs, device=y.device, dtype=torch.float32)
    with torch.cuda.device_of(y):
        _backward_kernel[(programs,)](
            tuple(dxs),
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
            K=K,
            BLOCK=block,
            WIDTH=width,
            STAGES=config.stages,
            num_warps=config.warps,
        )
    coefficient_gradients(dP, dg, partials, P, g, active)


def coefficient_gradients(dP: Tensor, dg: Tensor, partials: Tensor, P: Tensor, g: Tensor, active: int) -> None:
    """Fill `dP` and `dg` from the partial sums [K, K+1, programs]."""
    K, _, programs = partials.shape
    rows, columns = triton.next_power_of_2(K), triton.next_power_of_2(K + 1)
    with torch.cuda.device_of(partials):
        _coefficients_kernel[(1,)](
            dP,
            dg,
            partials,
            P,
            g,
            active,
            programs,
            K=K,
            ROWS=rows,
            COLUMNS=columns,
            CHUNK=COEFFICIENTS.vectors * 4 * 32 * COEFFICIENTS.warps // (rows * columns),
            num_warps=COEFFICIENTS.warps,
        )
