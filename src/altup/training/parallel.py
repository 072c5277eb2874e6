"""Several processes: the process group with its sums over ranks, and a model copied to them or sharded by FSDP2.

Started by `torchrun`, which sets RANK, LOCAL_RANK and WORLD_SIZE; without it there is one process and
nothing here communicates.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from altup.core.errors import UserError, named

WAIT_MINUTES = 60  # for other ranks in a collective: longer than the watchdog's patience, which says more


@dataclass(frozen=True)
class ProcessGroup:
    """This process, its rank and device among all of them."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of `numbers` over all ranks (on CPU tensors through Gloo: no device is waited for)."""
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    @torch.no_grad()
    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give every rank the values of rank 0."""
        for tensor in tensors if self.world_size > 1 else ():
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)

    def broadcast(self, text: str | None) -> str | None:
        """Rank 0's `text`, on every rank."""
        if self.world_size == 1:
            return text
        data = b"" if text is None else b"+" + text.encode()
        size = self.all_reduce(torch.tensor([len(data) if self.is_first else 0]))
        box = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_first and data:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(box, src=0)
        received = bytes(box.tolist())
        return received[1:].decode() if received else None

    def board(self) -> Any:
        """Notes that ranks write and read without waiting for each other, by a connection of its own."""
        if self.world_size == 1:
            return None
        board: Any = dist.distributed_c10d._get_default_store()
        board = board.clone()
        board.set_timeout(timedelta(seconds=10))
        return board

    def barrier(self) -> None:
        if self.world_size > 1:
            self.all_reduce(torch.zeros(1))

    def all_gather(self, text: str) -> list[str]:
        """The `text` of every rank, on every rank."""
        if self.world_size == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        pieces = torch.zeros(int(self.all_reduce(sizes).sum()), dtype=torch.uint8).split(sizes.tolist())
        pieces[self.rank].copy_(data)
        return [
            bytes(piece.tolist()).decode() for piece in self.all_reduce(torch.cat(pieces)).split(sizes.tolist())
        ]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails here on one rank fails on all: none waits for another that has given up."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        failures = self.all_reduce(torch.tensor([failure is not None], dtype=torch.int64))
        if failure:
            raise failure
        if failures.item():
            raise UserError("another process could not go on; its message says why")


@contextlib.contextmanager
def join_process_group() -> Iterator[ProcessGroup]:
    """Join the process group that `torchrun` describes, and leave it at the end."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"process {rank} is number {local} on a machine with {torch.cuda.device_count()} GPUs; "
                "start at most one process a GPU (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world == 1:
        yield ProcessGroup(rank, world, device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=_meeting_place(), rank=rank, world_size=world, timeout=timedelta(minutes=WAIT_MINUTES)
    )
    try:
        yield ProcessGroup(rank, world, device)
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dist.Store | None:
    """Where processes of one machine look for each other; None, for several machines, leaves it to PyTorch.

    When `torchrun` restarts processes that crashed, the store still holds the addresses of the dead ones (PyTorch
    2.13, issue 135712), so every attempt gets a part of the store for itself. Machines count attempts each for
    themselves and need not agree on the number.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    store, _, _ = next(rendezvous("env://"))
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def leave(code: int = 0) -> NoReturn:
    """End one of several processes, its work done and saved.

    Gloo's threads can outlive the interpreter and abort it on its way out ("terminate called without an active
    exception", seen now and then with torch 2.13), which would turn success into failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_share(micro_batch: int, world: int) -> None:
    if micro_batch % world:
        raise UserError(
            f"{named('micro_batch', micro_batch)} cannot be shared by {world} processes; give a multiple of "
            f"{world}"
        )


def shards_weights(parallel: str, process_group: ProcessGroup) -> bool:
    """Whether every rank holds a part of the weights only."""
    return parallel == "fsdp" and process_group.world_size > 1


def distribute(model: nn.Module, parallel: str, low_precision: bool, process_group: ProcessGroup) -> nn.Module:
    """`model` on this process's device: sharded, or a whole one with the weights of rank 0."""
    if shards_weights(parallel, process_group):
        return _shard(model, low_precision, process_group)
    model.to(process_group.device)
    process_group.share(itertools.chain(model.parameters(), model.buffers()))
    return model


def _shard(model: nn.Module, low_precision: bool, process_group: ProcessGroup) -> nn.Module:
    """FSDP2: one group a layer and one for the rest; float32 masters, bf16 on the wire when asked for.

    The coefficients of the update rules form groups of their own that stay float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from altup.nn import CoefficientModule

    mesh = init_device_mesh(process_group.device.type, (process_group.world_size,))
    low = torch.bfloat16 if low_precision else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    uses = collections.Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {parameter for parameter, number in uses.items() if number > 1}  # must all be in one group: the rest's
    for module in reversed(list(model.modules())):  # children before their parents
        if isinstance(module, CoefficientModule):
            fully_shard(module, mesh=mesh, mp_policy=exact)
        elif type(module).__name__ in layers and tied.isdisjoint(module.parameters()):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if any(parameter.is_meta for parameter in model.parameters()):  # built without weights, which follow
        device = process_group.device
        model._apply(lambda t: torch.empty_like(t, device=device).fill_(torch.nan) if t.is_meta else t.to(device))
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    """FSDP exchanges gradients only in the last micro-batch of a step."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)  # type: ignore[operator]
    yield


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor's full value (a collective: every rank must call it); others as they are."""
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def gather(tensors: dict[str, torch.Tensor], process_group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Full values of `tensors` on the CPU of rank 0; empty elsewhere."""
    kept = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if process_group.is_first:
            kept[name] = full.cpu()
    return kept
