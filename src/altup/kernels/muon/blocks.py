"""A Triton kernel that orthogonalizes the blocks of matrices and moves the weights, in one pass.

A block is so flat, 64 rows or columns at most, that a program holds its Gram matrix R = X·Xᵀ in registers. The
iterations are those on Gram matrices (`gram.py`), in float32 and without a restart; ‖X‖² is the trace of R.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.multi_tensor import TensorList, pointer
from altup.kernels.muon.reference import ITERATIONS, NEWTON_SCHULZ, Block

FLATTEST = 64  # rows or columns that a block may have in its shorter direction
LONG = 64  # rows or columns of the longer direction that a program holds at a time


@triton.jit
def _halves(x):
    """float32 as the sum of two float16, 22 bits: numbers here are about 1, and small ones need not be exact."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _times(a, b):
    """a·b of float32 matrices, without the product of the lower halves."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _places(start, row, columns, flat, long, TALL: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr):
    """Places and mask of a part of a block: [FLAT, LONG] or, where blocks are TALL, [LONG, FLAT]."""
    i, j = tl.arange(0, FLAT), start + tl.arange(0, LONG)
    if TALL:
        return j[:, None] * columns + i[None, :] + row, (j < long)[:, None] & (i < flat)[None, :]
    else:
        return i[:, None] * columns + j[None, :] + row, (i < flat)[:, None] & (j < long)[None, :]


@triton.jit
def _blocks_kernel(
    weights, weight_like, directions, factors, lr, skip, numel, columns, flat, long, along, decay, a, b, c,
    ITERATIONS: tl.constexpr, TALL: tl.constexpr, FLAT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """w ← w - lr·(decay·w + factor·u), with u the orthogonalized direction. A program has a block of a matrix.

    A block is flat × long or, where TALL, long × flat, and `along` of them lie side by side.
    """
    if tl.load(skip) != 0:
        return
    n, block = tl.program_id(1), tl.program_id(0)
    across, down = block % along, block // along
    if TALL:
        first = down.to(tl.int64) * long * columns + across * flat
    else:
        first = down.to(tl.int64) * flat * columns + across * long
    matrix = directions + n.to(tl.int64) * numel
    gram = tl.zeros([FLAT, FLAT], tl.float32)
    for start in range(0, long, LONG):
        at, inside = _places(start, first, columns, flat, long, TALL, FLAT, LONG)
        x = tl.load(matrix + at, mask=inside, other=0.0)
        if TALL:
            gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee")
        else:
            gram = tl.dot(x, tl.trans(x), gram, input_precision="ieee")
    i = tl.arange(0, FLAT)
    diagonal = i[:, None] == i[None, :]
    norm = tl.maximum(tl.sqrt(tl.sum(tl.where(diagonal, gram, 0.0))), 1e-7)
    gram = gram / (norm * norm)
    q = tl.where(diagonal, 1.0, 0.0)
    for _ in range(ITERATIONS - 1):
        z = tl.where(diagonal, a, 0.0) + b * gram + c * _times(gram, gram)
        q = _times(q, z)
        gram = _times(_times(gram, z), z)
    q = _times(q, tl.where(diagonal, a, 0.0) + b * gram + c * _times(gram, gram))
    q = q * (tl.load(factors + n) / norm)
    # In two parts, because the first has eight bits of each number alone.
    high = q.to(directions.dtype.element_ty)
    low = (q - high.to(tl.float32)).to(directions.dtype.element_ty)
    rate = tl.load(lr).to(tl.float32)
    at_weights = pointer(weights, weight_like, n)
    for start in range(0, long, LONG):
        at, inside = _places(start, first, columns, flat, long, TALL, FLAT, LONG)
        x = tl.load(matrix + at, mask=inside, other=0.0)
        w = tl.load(at_weights + at, mask=inside, other=0.0).to(tl.float32)
        if TALL:
            u = tl.dot(x, low, input_precision="ieee")
            u = tl.dot(x, high, u, input_precision="ieee")
        else:
            u = tl.dot(low, x, input_precision="ieee")
            u = tl.dot(high, x, u, input_precision="ieee")
        w -= rate * (decay * w + u)
        tl.store(at_weights + at, w.to(weight_like.dtype.element_ty), mask=inside)


def descend_by_blocks(
    weights: TensorList, directions: Tensor, block: Block, factors: Tensor, *, lr: Tensor, skip: Tensor,
    weight_decay: float,
) -> None:  # fmt: skip
    """Weights [rows, columns] in place, by their directions [n, rows, columns] cut into blocks.

    `factors` [n] scale the orthogonalized ones. Nothing happens where `skip`, a scalar of bytes, is not 0.
    """
    n, rows, columns = directions.shape
    tall = block[0] > block[1]
    flat, long = min(block), max(block)
    along = columns // block[1]
    with torch.cuda.device_of(directions):
        _blocks_kernel[rows // block[0] * along, n](
            *weights, directions, factors, lr, skip, rows * columns, columns, flat, long, along, weight_decay,
            *NEWTON_SCHULZ, ITERATIONS=ITERATIONS, TALL=tall, FLAT=max(16, triton.next_power_of_2(flat)),
            LONG=LONG, num_warps=4,
        )  # fmt: skip
