"""Triton kernels of the router's own gradients, sums over all tokens: a pass over x, then one over partial sums.

With Z = Σ over tokens of (∂routed / (rms d)) ⊗ x: [K, d], those of the router's weight and of its norm's scale are

    d_weightₖ = Zₖ ∘ norm,    d_norm = Σₖ Zₖ ∘ weightₖ
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import flat, multiprocessors

ROWS, COLUMNS, WARPS = 8, 256, 4  # of a tile; not timed yet
PROGRAMS_PER_SM = 4


@triton.jit
def _sums_kernel(
    sums, x, d_routed, inverses, tokens, chunk, d, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Σ over `chunk` tokens from the program's first, for its columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, tokens)
    totals = ()
    for _ in tl.static_range(K):
        totals = totals + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    for start in range(first, last, ROWS):
        token = start + tl.arange(0, ROWS)
        inside = token < last
        mask = inside[:, None] & (columns < d)[None, :]
        value = tl.load(x + token[:, None] * d + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + token, mask=inside, other=0.0) / d
        new = ()
        for k in tl.static_range(K):
            share = tl.load(d_routed + token * K + k, mask=inside, other=0.0) * inverse
            new = new + (totals[k] + share[:, None] * value,)
        totals = new
    for k in tl.static_range(K):
        place = (tl.program_id(1) * K + k) * d + columns
        tl.store(sums + place, tl.sum(totals[k], axis=0), mask=columns < d)


@triton.jit
def _gradients_kernel(d_weight, d_norm, sums, weight, norm, chunks, d, K: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < d
    scale = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    of_norm = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        total = tl.zeros([COLUMNS], tl.float32)
        for chunk in range(0, chunks):
            total += tl.load(sums + (chunk * K + k) * d + columns, mask=mask, other=0.0)
        of_norm += total * tl.load(weight + k * d + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_weight + k * d + columns, (total * scale).to(d_weight.dtype.element_ty), mask=mask)
    tl.store(d_norm + columns, of_norm.to(d_norm.dtype.element_ty), mask=mask)


def gradients(
    d_weight: Tensor, d_norm: Tensor, x: Tensor, d_routed: Tensor, inverses: Tensor, weight: Tensor, norm: Tensor
) -> None:
    """Fill the gradients of weight: [K, d] and norm: [d]. x: [..., d], d_routed: [..., K], inverses: [...]."""
    x, d_routed, inverses, weight, norm = flat((x, d_routed, inverses, weight, norm))
    (K, d), tokens = weight.shape, inverses.numel()
    across = triton.cdiv(d, COLUMNS)
    chunks = max(1, min(triton.cdiv(tokens, ROWS), multiprocessors(x.device) * PROGRAMS_PER_SM // across))
    chunk = triton.cdiv(triton.cdiv(tokens, chunks), ROWS) * ROWS
    sums = x.new_empty(chunks, K, d, dtype=torch.float32)
    if not tokens:
        d_weight.zero_()
        d_norm.zero_()
        return
    _sums_kernel[(across, chunks)](
        sums, x, d_routed, inverses, tokens, chunk, d, K=K, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
    )
    _gradients_kernel[(triton.cdiv(d, 64),)](
        d_weight, d_norm, sums, weight, norm, chunks, d, K=K, COLUMNS=64, num_warps=1
    )
