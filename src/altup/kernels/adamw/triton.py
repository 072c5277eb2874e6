"""Triton kernels of AdamW-RMS, for many tensors of one size at a time.

Two passes, of which the first reads the weights for their RMS. What a program adds up it writes once, and the
parts are added in a fixed order, so that results are the same bit for bit from run to run. Nothing waits for the
host.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.multi_tensor import TensorList, pointer

BLOCK = 2048  # numbers of a tensor that a program works on
PARTS = 1024  # sums that are added at a time


@triton.jit
def _squares_kernel(weights, weight_like, parts, numel, BLOCK: tl.constexpr):
    """A program for every (part of a tensor, tensor), because a grid may be long in its first dimension alone."""
    part, n = tl.program_id(0), tl.program_id(1)
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(pointer(weights, weight_like, n) + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(parts + n * tl.num_programs(0) + part, tl.sum(w * w))


@triton.jit
def _count_kernel(
    steps, step_like, largest, largest_like, parts, factors, lr, skip, numel, count, log_beta1, log_beta2,
    smallest, BOUNDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a tensor: t, lr · size / (1 - β₁ᵗ) and 1 / (1 - β₂ᵗ); the size is max(smallest, RMS(w)), BOUNDED
    by `largest`."""
    if tl.load(skip) != 0:
        return
    n = tl.program_id(0)
    step = tl.load(pointer(steps, step_like, n)) + 1  # by all threads, before the sum has them wait for each other
    if BOUNDED:
        bound = tl.load(pointer(largest, largest_like, n))
    total = tl.zeros([PARTS], tl.float32)
    for start in range(0, count, PARTS):
        j = start + tl.arange(0, PARTS)
        total += tl.load(parts + n * count + j, mask=j < count, other=0.0)
    size = tl.maximum(tl.sqrt(tl.sum(total) / numel), smallest)
    if BOUNDED:
        size = tl.minimum(size, bound)
    tl.store(pointer(steps, step_like, n), step)
    # In float64, because 1 - 0.999 has lost digits in float32.
    correction1 = 1 - tl.exp(step.to(tl.float64) * log_beta1)
    correction2 = 1 - tl.exp(step.to(tl.float64) * log_beta2)
    tl.store(factors + 2 * n, tl.load(lr).to(tl.float32) * size / correction1.to(tl.float32))
    tl.store(factors + 2 * n + 1, 1 / correction2.to(tl.float32))


@triton.jit
def _descend_kernel(
    weights, weight_like, grads, grad_like, means, mean_like, squares, square_like, factors, lr, skip, numel,
    fresh1, fresh2, eps, decay, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    n = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    at_w, at_m = pointer(weights, weight_like, n) + i, pointer(means, mean_like, n) + i
    at_v, at_g = pointer(squares, square_like, n) + i, pointer(grads, grad_like, n) + i
    w = tl.load(at_w, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(at_g, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(at_m, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(at_v, mask=inside, other=0.0).to(tl.float32)
    m = m - fresh1 * m + fresh1 * g  # from g - m a small gradient after a large one would lose its digits
    v = v - fresh2 * v + fresh2 * g * g
    u = m / (tl.sqrt(v * tl.load(factors + 2 * n + 1)) + eps)
    w -= tl.load(lr).to(tl.float32) * decay * w + tl.load(factors + 2 * n) * u
    tl.store(at_w, w.to(weight_like.dtype.element_ty), mask=inside)
    tl.store(at_m, m.to(mean_like.dtype.element_ty), mask=inside)
    tl.store(at_v, v.to(square_like.dtype.element_ty), mask=inside)


def update(
    weights: TensorList, grads: TensorList, means: TensorList, squares: TensorList, steps: TensorList,
    largest: TensorList | None = None, *, lr: Tensor, skip: Tensor, betas: tuple[float, float], eps: float,
    weight_decay: float, smallest: float,
) -> None:  # fmt: skip
    """One step in place, counted in `steps`, which are scalars; nothing where the bool scalar `skip` is true.

    `largest` are scalars too, and max(smallest, RMS(weight)) is at most that. `lr` and `skip` are on the weights'
    device.
    """
    n, numel = len(weights.addresses), weights.like.numel()
    count = triton.cdiv(numel, BLOCK)
    parts = weights.addresses.new_empty(n, count, dtype=torch.float32)
    factors = parts.new_empty(n, 2)
    skip = skip.view(torch.uint8)
    log_beta1, log_beta2 = (math.log(beta) if beta else -math.inf for beta in betas)
    with torch.cuda.device_of(parts):
        _squares_kernel[count, n](*weights, parts, numel, BLOCK=BLOCK)
        _count_kernel[n,](
            *steps, *(largest or steps), parts, factors, lr, skip, numel, count, log_beta1, log_beta2, smallest,
            BOUNDED=largest is not None, PARTS=PARTS,
        )  # fmt: skip
        _descend_kernel[count, n](
            *weights, *grads, *means, *squares, factors, lr, skip, numel,
            1 - betas[0], 1 - betas[1], eps, weight_decay, BLOCK=BLOCK,
        )  # fmt: skip
