"""Parameters that live on one device or, under FSDP2, in pieces on many: both seen as local tensors and sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from altup.core.errors import UserError

# Parameters of one kind are worked on together, up to this many elements: few kernel launches for the many
# small tensors, bounded scratch memory for the large ones; on a CPU, what its caches can hold.
STACK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}


class Kind(NamedTuple):
    """What parameters must share to be stacked. `sharding` is None for an ordinary tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    sharding: tuple[DeviceMesh, tuple[Placement, ...]] | None

    @property
    def working_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_everywhere(self) -> bool:
        """Whether no process's piece is empty. All know it alike: they must choose the same way to update it,
        because each way has messages of its own."""
        if self.sharding is None:
            return True
        mesh, placements = self.sharding
        counts = [mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard()]
        return len(counts) < 2 and all(no_piece_is_empty(self.shape[0], count) for count in counts)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros whose first dimension is the parameter's and is sharded as it is."""
        if self.sharding is None:
            return torch.zeros(shape, dtype=self.working_dtype, device=self.device)
        mesh, placements = self.sharding
        return zeros(*shape, dtype=self.working_dtype, device_mesh=mesh, placements=placements)

    def total(self, *parts: Tensor) -> list[Tensor]:
        """Each of `parts` summed over the processes that share the parameter, in one message."""
        if self.sharding is None:
            return list(parts)
        flat = torch.cat([part.flatten() for part in parts])
        mesh, placements = self.sharding
        for i, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(flat, group=mesh.get_group(i))
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]

    def rms(self, pieces: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """[n]: the root mean squares of n tensors of this kind, of which these are the local pieces."""
        norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=self.working_dtype))
        (squares,) = self.total(norms.square())
        return (squares / self.shape.numel()).sqrt()


def no_piece_is_empty(rows: int, count: int) -> bool:
    """Whether `torch.chunk` leaves some of the rows in each of `count` pieces: all but the last are ⌈rows / count⌉
    long, so that 768 rows are not enough for 40 processes."""
    return -(-rows // count) * (count - 1) < rows


def kind(parameter: Tensor) -> Kind:
    sharding = None
    if isinstance(parameter, DTensor):
        sharding = (parameter.device_mesh, tuple(parameter.placements))
        if not all(placement in (Shard(0), Replicate()) for placement in parameter.placements):
            raise UserError(
                f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements}; "
                "the optimizers know parameters sharded along dimension 0 only, as fully_shard does"
            )
    return Kind(parameter.shape, parameter.dtype, parameter.device, sharding)


def local(tensor: Tensor) -> Tensor:
    """This process's piece. Cheap and without a graph only under no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stacks(
    parameters: Iterable[Tensor], most_elements: Mapping[str, int] = STACK_ELEMENTS
) -> Iterator[tuple[Kind, list[Tensor]]]:
    """The parameters that have a gradient, in lists of one kind; the same lists on every process."""
    kinds = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[kind(parameter)].append(parameter)
    for what, alike in kinds.items():
        elements = most_elements.get(what.device.type, most_elements["cuda"])
        most = max(1, elements // max(1, what.shape.numel()))
        for start in range(0, len(alike), most):
            yield what, alike[start : start + most]
