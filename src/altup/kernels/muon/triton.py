"""Muon's update by Triton kernels, for many matrices of one shape at a time.

One pass over gradients, momenta and weights makes the matrices to orthogonalize; one moves the weights. Between
them are the matrix products, or they are part of the second (`blocks.py`). What a program adds up it writes once,
and the parts are added in a fixed order, so that results are the same bit for bit from run to run. Nothing waits
for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.multi_tensor import TensorList, pointer
from altup.kernels.muon.blocks import FLATTEST, descend_by_blocks
from altup.kernels.muon.gram import iterate_gram
from altup.kernels.muon.reference import MOMENTUM, Block, into_blocks, out_of_blocks, scale_of

BLOCK = 2048  # numbers of a tensor that a program works on
PARTS = 1024  # sums that are added at a time
TOGETHER = 2**24  # numbers of the Gram matrices of a stack that is orthogonalized with others of their size


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
def _count_kernel(
    steps, step_like, largest, largest_like, squares, factors, norms, skip, numel, count, scale, smallest,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Of a tensor: the step, the norm of its direction, and scale · min(max(smallest, RMS(w)), largest)."""
    n = tl.program_id(0)
    step = tl.load(pointer(steps, step_like, n)) + 1  # by all threads, before the sum has them wait for each other
    bound = tl.load(pointer(largest, largest_like, n))
    of_directions, of_weights = tl.zeros([PARTS], tl.float32), tl.zeros([PARTS], tl.float32)
    for start in range(0, count, PARTS):
        j = start + tl.arange(0, PARTS)
        at = squares + 2 * (n * count + j)
        of_directions += tl.load(at, mask=j < count, other=0.0)
        of_weights += tl.load(at + 1, mask=j < count, other=0.0)
    tl.store(norms + n, tl.sqrt(tl.sum(of_directions)))
    size = tl.minimum(tl.maximum(tl.sqrt(tl.sum(of_weights) / numel), smallest), bound)
    tl.store(factors + n, scale * size)
    if tl.load(skip) == 0:
        tl.store(pointer(steps, step_like, n), step)


@triton.jit
def _normalize_kernel(directions, norms, out, numel, BLOCK: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(directions + n * numel + i, mask=i < numel, other=0.0).to(tl.float32)
    d = d / tl.maximum(tl.load(norms + n), 1e-7)
    tl.store(out + n * numel + i, d.to(out.dtype.element_ty), mask=i < numel)


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


class Stack(NamedTuple):
    """n tensors of one shape, [..., rows, columns], their gradients and their state; `steps` and `largest` are
    scalars: how many updates there were, and what bounds the sizes."""

    weights: TensorList
    grads: TensorList
    momenta: TensorList
    steps: TensorList
    largest: TensorList

    @property
    def shape(self) -> torch.Size:
        return self.weights.like.shape

    @property
    def grams(self) -> tuple[int, int]:
        """How long the Gram matrices of n matrices are, and how many numbers they have."""
        m = min(self.shape[-2:])
        return m, len(self.weights.addresses) * m * m


def update(
    stacks: Sequence[Stack], *, lr: Tensor, skip: Tensor, weight_decay: float, smallest: float,
    block: Block | None = None,
) -> None:  # fmt: skip
    """One step of each stack in place; nothing where the bool scalar `skip` is true.

    `lr` and `skip` are on the weights' device. With `block`, matrices are cut into blocks of this shape. Small
    matrices of several shapes are orthogonalized together, where their Gram matrices are of one size.
    """
    skip = skip.view(torch.uint8)
    for together in [[stack] for stack in stacks] if block is not None else _alike(stacks):
        made = [_direct(stack, skip, smallest, block) for stack in together]
        if block is not None and min(block) <= FLATTEST:
            for stack, (directions, factors, _) in zip(together, made, strict=True):
                descend_by_blocks(
                    stack.weights, directions, block, factors, lr=lr, skip=skip, weight_decay=weight_decay
                )
            continue
        if block is None and len(together[0].shape) == 2:
            updates = iterate_gram(*(_normalized(directions, norms) for directions, _, norms in made))
        else:
            updates = [orthogonalized_by_gram(directions, block) for directions, _, _ in made]
        for stack, (directions, factors, _), moved in zip(together, made, updates, strict=True):
            n, numel = len(directions), directions[0].numel()
            with torch.cuda.device_of(directions):
                _descend_kernel[triton.cdiv(numel, BLOCK), n](
                    *stack.weights, moved, factors, lr, skip, numel, weight_decay, BLOCK=BLOCK
                )


def _alike(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """The stacks of matrices that are orthogonalized together: small ones with Gram matrices of one size."""
    groups: dict[tuple, list[Stack]] = {}
    for offset, stack in enumerate(stacks):
        m, numbers = stack.grams
        small = len(stack.shape) == 2 and numbers <= TOGETHER
        groups.setdefault((m,) if small else (m, offset), []).append(stack)
    return list(groups.values())


def _direct(stack: Stack, skip: Tensor, smallest: float, block: Block | None) -> tuple[Tensor, Tensor, Tensor]:
    """Momenta and steps in place; the directions [n, ...], what scales them orthogonalized, and their norms."""
    weights, grads, momenta, steps, largest = stack
    n, shape, numel = len(weights.addresses), stack.shape, weights.like.numel()
    count = triton.cdiv(numel, BLOCK)
    dtype = torch.bfloat16 if weights.like.is_cuda else torch.float32
    directions = torch.empty(n, *shape, dtype=dtype, device=weights.like.device)
    squares = torch.empty(n, count, 2, dtype=torch.float32, device=directions.device)
    factors, norms = squares.new_empty(2, n)
    with torch.cuda.device_of(directions):
        _momentum_kernel[count, n](
            *grads, *momenta, *weights, directions, squares, skip, numel, MOMENTUM, BLOCK=BLOCK
        )
        _count_kernel[n,](
            *steps, *largest, squares, factors, norms, skip, numel, count, scale_of(block or shape), smallest,
            PARTS=PARTS,
        )  # fmt: skip
    return directions, factors, norms


def orthogonalized_by_gram(directions: Tensor, block: Block | None = None) -> Tensor:
    """`orthogonalized` of [..., rows, columns], in float16 and contiguous."""
    whole = directions.shape
    if block is not None:
        directions = into_blocks(directions, block)
    matrices = directions.reshape(-1, *directions.shape[-2:])
    (done,) = iterate_gram(_normalized(matrices, matrices.norm(dim=(-2, -1), dtype=torch.float32)))
    done = done.view(directions.shape)
    return done if block is None else out_of_blocks(done).reshape(whole)


def _normalized(matrices: Tensor, norms: Tensor) -> Tensor:
    """matrices / norms, in float16."""
    x = torch.empty_like(matrices, dtype=torch.float16 if matrices.is_cuda else torch.float32)
    numel = matrices[0].numel()
    with torch.cuda.device_of(x):
        _normalize_kernel[triton.cdiv(numel, BLOCK), len(x)](matrices, norms, x, numel, BLOCK=BLOCK)
    return x
