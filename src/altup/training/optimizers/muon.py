"""Muon (Jordan, 2024) for the matrices of layers, with updates relative to the size of the parameter.

torch has a Muon (`torch.optim.Muon`). It waits for the learning rate on the host, so that its step cannot be
recorded as a CUDA graph, cannot be skipped on the device, and does not know sharded parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from altup.core.errors import UserError
from altup.kernels.muon import muon_updates, orthogonalize, runs_fused, scale_of
from altup.kernels.muon.reference import MOMENTUM, Block
from altup.training.optimizers.adamw import RelativeAdamW
from altup.training.optimizers.config import LARGEST_GROWTH
from altup.training.optimizers.relative import SMALLEST_RMS
from altup.training.optimizers.sharding import STACK_ELEMENTS, Kind, local, stacks

PILE_ELEMENTS = {**STACK_ELEMENTS, "cuda": 2**27}  # products of many matrices at once fill a GPU
SIZE_OF_ZEROS = 0.02  # what a parameter that begins with zeros, as biases do, is taken to be like


class Muon(RelativeAdamW):
    """Of a matrix with gradient G only the directions count, not how large each of them is:

        m ← 0.95·m + 0.05·G
        U = 0.2 · √max(rows, columns) · orthogonalized(0.95·m + 0.05·G)        [RMS about 0.2]
        p ← (1 - lr·weight_decay)·p - lr · min(max(1e-3, RMS(p)), growth·RMS(p at the start)) · U

    for the groups with `orthogonal=True`. A tensor of more dimensions is a pile of matrices. The matrices of a
    group with a `block` are cut into blocks of this shape, (rows, columns), and each block has the U of a matrix.
    All other groups have the U of `RelativeAdamW`. State of a matrix: `step`, `largest` and `momentum`.

    Steps relative to the present size let weights grow by a factor in every step: at high rates a long run would
    end in infinities, so that size has a bound. (With the size of the start alone the plateau lasts longer.)

    In a group with a `unit` that stands for the size, whatever p has grown to, and `growth` says nothing.

    A group with a `pull` then goes p ← p + min(1, lr · pull) · (p at the start - p), which holds what takes steps
    of lr times its size within 1 / pull of that size.

    Under FSDP2 the processes exchange rows, so that each orthogonalizes its share of the whole matrices.
    """

    KERNEL_STATE = (*RelativeAdamW.KERNEL_STATE, "largest")
    MATRIX_STATE = ("momentum", "step", "largest")

    @torch.no_grad()
    def initial_state(self, p: Tensor, what: Kind, group: dict[str, Any]) -> dict[str, Tensor]:
        rms = what.rms([local(p)])[0]
        size = rms.clamp(min=SMALLEST_RMS).where(rms > 0, SIZE_OF_ZEROS)
        kept = {"largest": group.get("growth", LARGEST_GROWTH) * size}
        if unit := group.get("unit"):
            kept["largest"] = torch.full_like(size, unit)
        if group.get("pull"):
            kept["start"] = p.detach().clone()
        if group["orthogonal"]:
            return {**kept, "momentum": what.zeros(*what.shape)}
        return {**kept, **super().initial_state(p, what, group)}

    def size(self, what: Kind, weights: list[Tensor], state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        return torch.minimum(super().size(what, weights, state, group), state["largest"])

    def _update_all(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        if group["orthogonal"]:
            by_kernels = all(self._runs_matrix_kernels(p) for p in parameters if p.grad is not None)
            found = list(stacks(parameters, PILE_ELEMENTS if by_kernels else STACK_ELEMENTS))
            if by_kernels and found:
                self._update_by_kernels([alike for _, alike in found], group, skip)
            else:
                for what, alike in found:
                    self._update(what, alike, group, skip)
        else:
            super()._update_all(parameters, group, skip)
            self._pull([p for p in parameters if p.grad is not None], group, skip)

    def _pull(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """Towards where they began, but never beyond it."""
        if not group.get("pull") or not parameters:
            return
        weights = [local(p) for p in parameters]
        away = torch._foreach_sub([local(self.state[p]["start"]) for p in parameters], weights)
        part = torch.ones((), device=weights[0].device).mul_(group["lr"] * group["pull"]).clamp_(max=1)
        torch._foreach_mul_(away, part if skip is None else part.masked_fill_(skip, 0))
        torch._foreach_add_(weights, away)

    def _update(self, what: Kind, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """By kernels around the matrix products, where they can."""
        if not group["orthogonal"] or not all(self._runs_matrix_kernels(p) for p in parameters):
            super()._update(what, parameters, group, skip)
        else:
            self._update_by_kernels([parameters], group, skip)

    def _update_by_kernels(self, alike: list[list[Tensor]], group: dict[str, Any], skip: Tensor | None) -> None:
        """Parameters of each shape."""
        given = []
        for parameters in alike:
            grads = [p.grad for p in parameters if p.grad is not None]
            state = ([self.state[p][name] for p in parameters] for name in self.MATRIX_STATE)
            given.append([parameters, grads, *state])
        muon_updates(
            given, lr=group["lr"], skip=skip, weight_decay=group.get("weight_decay", 0.0),
            smallest=SMALLEST_RMS, block=group.get("block"),
        )  # fmt: skip

    def _runs_matrix_kernels(self, p: Tensor) -> bool:
        if p.grad is None or isinstance(p, DTensor):
            return False
        return runs_fused(p, p.grad, *(self.state[p][name] for name in self.MATRIX_STATE))

    def direction(
        self, what: Kind, state: dict[str, Tensor], grad: Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        if not group["orthogonal"]:
            return super().direction(what, state, grad, group)
        momentum = state["momentum"].lerp(grad, 1 - MOMENTUM)
        block = group.get("block")
        update = orthogonalized_shards(what, grad.lerp(momentum, MOMENTUM), block).to(grad.dtype)
        return {"momentum": momentum}, update, torch.full_like(state["step"], scale_of(block or what.shape))


def orthogonalized_shards(what: Kind, pieces: Tensor, block: Block | None = None) -> Tensor:
    """`orthogonalized` of n stacked matrices, of which `pieces` [n, rows here, columns] are local."""
    shards = [] if what.sharding is None else [i for i, one in enumerate(what.sharding[1]) if one.is_shard()]
    if not shards or len(what.shape) > 2:  # a pile of matrices is sharded between them
        return orthogonalize(pieces, block)
    if len(shards) > 1:
        raise UserError("optimizer='muon' knows parameters sharded over one dimension of the device mesh only")
    assert what.sharding is not None
    group = what.sharding[0].get_group(shards[0])
    count, world = len(pieces), dist.get_world_size(group)
    rows, columns = what.shape
    # Equal parts for all: so many whole matrices a process, so many rows of each from a process.
    each, share = -(-count // world), -(-rows // world)
    if block is not None and block[1] == columns and share % block[0] == 0:  # every process has whole blocks
        return orthogonalize(pieces, block) if pieces.numel() else pieces
    sent = pieces.new_zeros(world * each, share, columns)
    sent[:count, : pieces.shape[1]] = pieces
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)  # by [process of the rows, matrix, row]
    whole = received.view(world, each, share, columns).transpose(0, 1).reshape(each, world * share, columns)
    done = orthogonalize(whole[:, :rows], block).to(pieces.dtype)
    sent = pieces.new_zeros(each, world * share, columns)
    sent[:, :rows] = done
    sent = sent.view(each, world, share, columns).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)  # by [process of the matrix, matrix, row]
    return received.view(world * each, share, columns)[:count, : pieces.shape[1]]
