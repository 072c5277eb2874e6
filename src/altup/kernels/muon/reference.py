"""The definition of one update of Muon: of a matrix only the directions of its gradient count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Block = tuple[int, int]  # rows and columns of the blocks that a matrix is cut into
MOMENTUM = 0.95
UPDATE_RMS = 0.2  # what AdamW's updates have, about, so that both take the same learning rates
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def muon_reference(
    weight: Tensor, grad: Tensor, momentum: Tensor, *, lr: Tensor | float, weight_decay: float, smallest: float,
    largest: Tensor, block: Block | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The new weight w and momentum m of a matrix, or of a pile of matrices [..., rows, columns]:

        m ← 0.95·m + 0.05·g
        u = 0.2 · √max(rows, columns) · orthogonalized(0.95·m + 0.05·g)        [RMS about 0.2]
        w ← w - lr·weight_decay·w - lr · min(max(smallest, RMS(w)), largest) · u

    With `block`, a matrix is cut into blocks of this shape, and each has the u of a matrix. Nothing is
    overwritten.
    """
    momentum = momentum.lerp(grad, 1 - MOMENTUM)
    update = orthogonalized(grad.lerp(momentum, MOMENTUM), block).to(weight.dtype)
    size = weight.square().mean().sqrt().clamp(min=smallest).minimum(largest)
    return weight - lr * weight_decay * weight - lr * size * scale_of(block or weight.shape) * update, momentum


def scale_of(shape: Sequence[int]) -> float:
    """What gives an orthogonalized matrix the RMS of an update."""
    return UPDATE_RMS * math.sqrt(max(shape[-2:]))


def orthogonalized(matrices: Tensor, block: Block | None = None) -> Tensor:
    """U·Vᵀ, roughly, of each matrix U·S·Vᵀ of [..., rows, columns]: its singular values become about 1.

    With `block`, of each block of this shape. Newton-Schulz iterations, X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ.
    In bf16 on a GPU, which is enough: the iteration brings singular values into [0.7, 1.2] and no nearer.
    """
    if block is not None:
        return out_of_blocks(orthogonalized(into_blocks(matrices, block)))
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    norms = x.norm(dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return iterate_newton_schulz(x / norms.clamp(min=1e-7).to(x.dtype))


def into_blocks(matrices: Tensor, block: Block) -> Tensor:
    """[..., rows, columns] → [..., blocks down, blocks across, rows of a block, columns of a block]."""
    return matrices.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).transpose(-3, -2)


def out_of_blocks(blocks: Tensor) -> Tensor:
    return blocks.transpose(-3, -2).flatten(-4, -3).flatten(-2)


def iterate_newton_schulz(x: Tensor) -> Tensor:
    """Of matrices whose singular values are at most 1."""
    *pile, rows, columns = x.shape
    x = x.reshape(-1, rows, columns)
    if rows > columns:
        x = x.mT
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if rows > columns:
        x = x.mT
    return x.reshape(*pile, rows, columns)
