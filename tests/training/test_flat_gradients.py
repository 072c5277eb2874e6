"""Gradients through flat buffers are those of PyTorch's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from altup.training.config import TrainConfig
from altup.training.engine import Engine
from altup.training.flat_gradients import FlatGradients
from altup.training.parallel import ProcessGroup, leave
from altup.training.prefetch import assemble
from tests.processes import fork_two, server
from tests.training.tiny import ALONE, SETTINGS, MadeUp, build


def make_engine(process_group: ProcessGroup, exchanges: bool, **changes: Any) -> Engine:
    torch.manual_seed(0)
    return Engine(build(), TrainConfig(**{**SETTINGS, **changes}), process_group, exchanges=exchanges)


def train(engine: Engine, spoilt: int | None = None) -> list[torch.Tensor]:
    """Four steps, one of them perhaps with a loss that is not finite on this rank."""
    for step in range(4):
        batch = assemble(MadeUp(), engine.config.micro_batch or 8, engine.process_group, step)
        tokens = engine.process_group.all_reduce(torch.tensor([batch.tokens])).item()
        engine.step(step, batch, float("nan") if step == spoilt else tokens)
    return [p.detach().clone() for p in engine.plain.parameters()]


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_step_through_flat_buffers_changes_no_bit(optimizer: str, micro_batch: int) -> None:
    settings = {"optimizer": optimizer, "micro_batch": micro_batch, "clip_norm": 0.1}
    ours, theirs = (train(make_engine(ALONE, exchanges, **settings), spoilt=2) for exchanges in (True, False))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_parameter_that_no_pass_reaches_is_left_alone(optimizer: str) -> None:
    """Without weight decay, and as by a single process that has no flat buffers."""
    found = []
    for exchanges in (True, False):
        torch.manual_seed(0)
        model = build()
        model.idle = nn.Linear(3, 4)
        config = TrainConfig(**{**SETTINGS, "optimizer": optimizer, "weight_decay": 0.1})
        engine = Engine(model, config, ALONE, exchanges=exchanges)
        before = model.idle.weight.detach().clone()
        found.append(train(engine))
        assert torch.equal(model.idle.weight, before)
        assert engine.optimizer.state[model.idle.weight]["step"] == 0
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_a_later_pass_reaches_is_updated() -> None:
    model = Mixed()
    flat = FlatGradients(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.1)
    before = model.idle.weight.detach().clone()
    for reaches in (False, True):
        model(torch.randn(2, 3, 3, 3)).backward()
        flat.take()
        if reaches:
            model.idle(torch.ones(1, 2)).sum().backward()
            flat.take(add=True)
        flat.give()
        with flat.leave_unreached(optimizer):
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.idle.weight, before) == (not reaches)


def train_beside_ddp(rank: int, address: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    process_group = ProcessGroup(rank, 2, torch.device("cpu"))
    ours, theirs = (make_engine(process_group, exchanges, clip_norm=0.1) for exchanges in (True, False))
    with torch.no_grad():
        ours.plain.get_input_embeddings().weight += rank  # which rank 0 settles
    ours = Engine(ours.plain, ours.config, process_group)
    theirs.plain = DistributedDataParallel(theirs.plain, gradient_as_bucket_view=True)
    # One rank alone has a step that is not finite, and both skip it.
    for engine in (ours, theirs):
        train(engine, spoilt=2 if rank == 1 else None)
    same = [torch.equal(a, b) for a, b in zip(ours.plain.parameters(), theirs.plain.parameters(), strict=True)]
    skipped = [engine.meter.read(process_group)["skipped"] for engine in (ours, theirs)]
    results.put((all(same), skipped))
    dist.barrier()
    leave()


def test_two_ranks_train_as_under_ddp_to_the_last_bit(tmp_path: Path) -> None:
    """PyTorch's DistributedDataParallel; with dropout, clipping and a step that one rank spoils."""
    results = server.SimpleQueue()
    fork_two(train_beside_ddp, f"file://{tmp_path}/meeting", results)
    assert [results.get() for _ in range(2)] == [(True, [1, 1])] * 2


class Mixed(nn.Module):
    """Parameters of two dtypes and another layout; one is not used, one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.narrow = nn.Linear(20, 7, dtype=torch.bfloat16)
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(7, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.narrow(self.conv(x).flatten(1).bfloat16()).float()).sum()


def test_gradients_of_any_layout_keep_their_place() -> None:
    model = Mixed()
    flat = FlatGradients(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted: dict[str, torch.Tensor] = {}
    for number in range(2):
        model(torch.randn(2, 3, 3, 3)).backward()
        for name, p in parameters.items():
            assert p.grad is not None or name.startswith("idle")
            wanted[name] = wanted.get(name, 0) + (torch.zeros_like(p) if p.grad is None else p.grad)
        flat.take(add=number > 0)
        assert all(p.grad is None for p in parameters.values())
    flat.give()
    for name, p in parameters.items():
        assert p.grad is not None
        assert torch.equal(p.grad, wanted[name])
        assert p.grad.stride() == p.stride()
    assert model.frozen.weight.grad is None
    assert sorted(str(buffer.dtype) for buffer in flat.buffers) == ["torch.bfloat16", "torch.float32"]
    for buffer in flat.buffers:
        buffer.fill_(3)
    assert all((p.grad == 3).all() for p in parameters.values() if p.grad is not None)
