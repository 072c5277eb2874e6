"""Triton kernels around Muon's matrix products, for many matrices of one shape at a time.

Three passes: momentum and the matrices to orthogonalize, the weights' sizes, the step. What a program adds up it
writes once, and the parts are added in a fixed order, so that results are the same bit for bit from run to run.
Nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.multi_tensor import TensorList, pointer
from altup.kernels.muon.reference import MOMENTUM, iterate_newton_schulz, scale_of

BLOCK = 2048  # numbers of a tensor that a program works on


@triton.jit
def _momentum_kernel(
    grads, grad_like, momenta, momentum_like, weights, weight_like, directions, squares, skip, numel, momentum,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Momentum in place, direction = momentum·m + (1 - momentum)·g, and the squares of directions and weights."""
    part, n = tl.program_id(0), tl.program_id(1)
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    at_m = pointer(momenta, momentum_like, n) + i
    g = tl.load(pointer(grads, grad_like, n) + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(at_m, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(pointer(weights, weight_like, n) + i, mask=inside, other=0.0).to(tl.float32)
    m = m + (1 - momentum) * (g - m)
    d = (m + (1 - momentum) * (g - m)).to(directions.dtype.element_ty)
    tl.store(directions + n.to(tl.int64) * numel + i, d, mask=inside)
    if tl.load(skip) == 0:
        tl.store(at_m, m.to(momentum_like.dtype.element_ty), mask=inside)
    at = squares + 2 * (n * tl.num_programs(0) + part)
    rounded = d.to(tl.float32)
    tl.store(at, tl.sum(rounded * rounded))
    tl.store(at + 1, tl.sum(w * w))


@triton.jit
def _descend_kernel(weights, weight_like, updates, factors, lr, skip, numel, decay, BLOCK: tl.constexpr):
    if tl.load(skip) != 0:
        return
    n = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    at = pointer(weights, weight_like, n) + i
    w = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(updates + n.to(tl.int64) * numel + i, mask=inside, other=0.0).to(tl.float32)
    w -= tl.load(lr).to(tl.float32) * (decay * w + tl.load(factors + n) * u)
    tl.store(at, w.to(weight_like.dtype.element_ty), mask=inside)


def update(
    weights: TensorList, grads: TensorList, momenta: TensorList, largest: Tensor, *, lr: Tensor, skip: Tensor,
    weight_decay: float, smallest: float,
) -> None:  # fmt: skip
    """One step in place of n tensors of one shape, [..., rows, columns]; nothing where the bool scalar `skip` is
    true.

    `largest` [n] bounds the sizes. `lr` and `skip` are on the weights' device.
    """
    n, shape, numel = len(weights.addresses), weights.like.shape, weights.like.numel()
    count = triton.cdiv(numel, BLOCK)
    dtype = torch.bfloat16 if weights.like.is_cuda else torch.float32
    directions = torch.empty(n, *shape, dtype=dtype, device=weights.like.device)
    squares = torch.empty(n, count, 2, dtype=torch.float32, device=directions.device)
    skip = skip.view(torch.uint8)
    with torch.cuda.device_of(directions):
        _momentum_kernel[count, n](
            *grads, *momenta, *weights, directions, squares, skip, numel, MOMENTUM, BLOCK=BLOCK
        )
    sizes = (squares[..., 1].sum(dim=1) / numel).sqrt().clamp(min=smallest).minimum(largest)
    if len(shape) == 2:
        norms = squares[..., 0].sum(dim=1).sqrt().view(n, 1, 1)
    else:  # a pile of matrices, of which each has its own
        norms = directions.norm(dim=(-2, -1), keepdim=True, dtype=torch.float32)
    directions /= norms.clamp(min=1e-7).to(dtype)
    updates = iterate_newton_schulz(directions).contiguous()
    with torch.cuda.device_of(directions):
        _descend_kernel[count, n](
            *weights, updates, sizes * scale_of(shape), lr, skip, numel, weight_decay, BLOCK=BLOCK
        )
