"""One update of Muon, for many matrices of one shape at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from altup.kernels.launch import runs_fused, runs_triton
from altup.kernels.muon.reference import Block, muon_reference, orthogonalized, scale_of

__all__ = [
    "muon_reference",
    "muon_update",
    "muon_updates",
    "orthogonalize",
    "orthogonalized",
    "runs_fused",
    "scale_of",
]


def orthogonalize(matrices: Tensor, block: Block | None = None) -> Tensor:
    """`orthogonalized` of [..., rows, columns], on a GPU by the kernel for symmetric products, in float16."""
    if not (matrices.is_cuda and runs_triton(matrices.device)):
        return orthogonalized(matrices, block)
    from altup.kernels.muon.triton import orthogonalized_by_gram

    return orthogonalized_by_gram(matrices, block)


@torch.no_grad()
def muon_update(
    weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], steps: Sequence[Tensor],
    largest: Sequence[Tensor], *, lr: Tensor | float, skip: Tensor | None = None, weight_decay: float,
    smallest: float, block: Block | None = None,
) -> None:  # fmt: skip
    """`muon_reference` of n tensors of one shape, in place, by the Triton kernels (see `runs_fused`).

    `steps` are scalars that count updates, `largest` scalars that bound the sizes. Nothing changes where the bool
    scalar `skip`, on the weights' device, is true; the host never waits for it.
    """
    stack = weights, grads, momenta, steps, largest
    muon_updates([stack], lr=lr, skip=skip, weight_decay=weight_decay, smallest=smallest, block=block)


@torch.no_grad()
def muon_updates(
    stacks: Sequence[Sequence[Sequence[Tensor]]], *, lr: Tensor | float, skip: Tensor | None = None,
    weight_decay: float, smallest: float, block: Block | None = None,
) -> None:  # fmt: skip
    """`muon_update` of several shapes at once; each stack is weights, grads, momenta, steps and largest."""
    from altup.kernels.multi_tensor import step_scalars, tensor_list
    from altup.kernels.muon.triton import Stack, update

    lr, skip = step_scalars(lr, skip, stacks[0][0][0].device)
    lists = [Stack(*map(tensor_list, stack)) for stack in stacks]
    update(lists, lr=lr, skip=skip, weight_decay=weight_decay, smallest=smallest, block=block)
