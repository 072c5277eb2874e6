"""One chunk's logits read, and overwritten with the gradient of the loss, in Triton.

For a row x with label y, L = log Σ exp x and the loss L − x_y + z·L²,

    ∂loss/∂x_v = exp(x_v − L)·(1 + 2·z·L) − [v = y].

With a soft cap c the row is x = c·tanh(r / c) of the logits r, and ∂x/∂r = 1 − (x / c)².
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.cross_entropy.reference import IGNORED

# Columns that a program works on at a time, and its warps: see benchmarks/tune_cross_entropy.py of 575338fc.
BLOCK, WARPS = 8192, 16
# The same up to so many columns: of rows that are one block, and of some that would leave much of a block empty.
SHORT = {4096: (4096, 4), 6144: (1024, 2)}
LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        e = tl.exp(-2.0 * tl.abs(x / softcap))
        bounded = softcap * (1.0 - e) / (1.0 + e)
        x = tl.where(x < 0, -bounded, bounded)
    return x


@triton.jit
def _rows(
    logits, labels, sums, z_loss, softcap, rows, row_stride,
    V: tl.constexpr, IGNORED: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. `sums` is [3, rows]: loss, negative log-likelihood, label is the first largest logit."""
    row = tl.program_id(0)
    x = logits + row.to(tl.int64) * row_stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORED:
        for part in range(3):
            tl.store(sums + part * rows + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                zeros = tl.zeros([BLOCK], logits.dtype.element_ty)
                tl.store(x + start + columns, zeros, mask=start + columns < V)
        return

    # Read before any thread can write: the reductions below are barriers. No such label: NaN, for all to see.
    of_label = tl.load(x + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
    of_label = _capped(of_label, softcap, CAPPED)
    largest = LOWEST  # finite, so that a block of −inf alone is nothing special
    total = 0.0
    first = V
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        v = tl.load(x + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        v = tl.where(inside, _capped(v, softcap, CAPPED), -float("inf")) if CAPPED else v
        peak = tl.max(v, 0)
        offset = tl.min(tl.where(v == peak, start + columns, V), 0)
        first = tl.where(peak > largest, offset, first)
        higher = tl.maximum(largest, peak)
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(v - higher), 0)
        largest = higher
    log_z = largest + tl.log(total)
    nll = log_z - of_label
    tl.store(sums + row, nll + z_loss * log_z * log_z)
    tl.store(sums + rows + row, nll)
    tl.store(sums + 2 * rows + row, (first == label).to(tl.float32))
    if GRADIENT:
        slope = 1.0 + 2.0 * z_loss * log_z
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            v = tl.load(x + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            v = _capped(v, softcap, CAPPED)
            gradient = tl.exp(v - log_z) * slope - (start + columns == label).to(tl.float32)
            if CAPPED:
                gradient *= 1.0 - (v / softcap) * (v / softcap)
            tl.store(x + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def loss_and_gradient_(
    logits: Tensor,
    labels: Tensor,
    z_loss: float,
    gradient: bool,
    block: int | None = None,
    warps: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Sums [3] of loss, nll and correct over the rows of `logits` [n, V], which become their own gradient."""
    rows, V = logits.shape
    sums = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    chosen = next((launch for most, launch in SHORT.items() if most >= V), (BLOCK, WARPS))
    block = min(block or chosen[0], triton.next_power_of_2(V))
    warps = warps or chosen[1]
    with torch.cuda.device_of(logits):
        _rows[(rows,)](
            logits, labels.contiguous(), sums, z_loss, softcap, rows, logits.stride(0),
            V=V, IGNORED=IGNORED, CAPPED=softcap > 0, GRADIENT=gradient, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return sums.sum(dim=1)


@triton.jit
def multiply_kernel(out, x, number, numel, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < numel).to(tl.float32)
    tl.store(out + offset, (value * tl.load(number)).to(out.dtype.element_ty), mask=offset < numel)
