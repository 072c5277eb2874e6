"""Steps replayed as CUDA graphs against the same steps launched one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altup.training.config import TrainConfig
from altup.training.engine import Engine, numerics
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import StepBatch, assemble, label_name
from tests.training.tiny import SETTINGS, MadeUp, build

pytestmark = pytest.mark.gpu


class Varied(TrainConfig):
    """A run whose batches come in many shapes, as fine-tuning's do."""

    SHAPES_VARY = True


def uneven(batch: StepBatch) -> StepBatch:
    """The same micro-batches, of which the last has lost a row: such a step is launched and not replayed."""
    *micro, last = batch.micro
    micro.append({name: tensor[:-1] for name, tensor in last.items()})
    return StepBatch(micro, sum(int((part[label_name(part)] != -100).sum()) for part in micro), batch.inputs)


def padded(batch: StepBatch) -> StepBatch:
    """The same rows, of which the last two tokens are padding."""
    for part in batch.micro:
        part["attention_mask"] = torch.ones_like(part["input_ids"])
        part["attention_mask"][:, -2:] = 0
    return batch


def train(
    graphs: bool,
    alter: Callable[[int, StepBatch], StepBatch] = lambda step, batch: batch,
    model: dict[str, Any] | None = None,
    config: type[TrainConfig] = TrainConfig,
    **changes: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    process_group = ProcessGroup(0, 1, torch.device("cuda", 0))
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "compile": True, **changes}
    torch.manual_seed(0)
    engine = Engine(build(**model or {}), config(**settings), process_group)
    if not graphs:
        engine._graphs = None
    else:
        assert engine._graphs is not None
    with numerics(True, True):  # AdamW would turn rounding of small gradients into steps
        for step in range(6):
            batch = alter(step, assemble(MadeUp(), settings["micro_batch"], process_group, step))
            engine.step(step, batch, batch.tokens)
    return {n: p.detach().cpu() for n, p in engine.plain.named_parameters()}, engine.meter.read(process_group)


def assert_alike(want: tuple[dict, dict], got: tuple[dict, dict]) -> None:
    assert got[1] == pytest.approx(want[1], rel=1e-4)
    for name, weight in want[0].items():
        torch.testing.assert_close(got[0][name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("micro_batch", [8, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms", "muon"])
def test_replayed_steps_train_as_launched_ones_do(
    micro_batch: int, clip_norm: float | None, optimizer: str
) -> None:
    """Dropout, accumulation and clipping included."""
    changes: dict[str, Any] = {
        "micro_batch": micro_batch,
        "clip_norm": clip_norm,
        "batch_size": 8,
        "optimizer": optimizer,
    }
    assert_alike(train(False, **changes), train(True, **changes))


@pytest.mark.parametrize("muon_by", ["head", "block"])
def test_muon_by_parts_of_matrices_is_replayed(muon_by: str) -> None:
    changes: dict[str, Any] = {"micro_batch": 8, "batch_size": 8, "optimizer": "muon", "muon_by": muon_by}
    assert_alike(train(False, **changes), train(True, **changes))


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms", "muon"])
def test_a_launched_step_behind_a_replayed_one_takes_none_of_its_gradient(optimizer: str) -> None:
    """Micro-batches of different shapes are not replayed, as packed rows of fine-tuning may have them."""

    def alter(step: int, batch: StepBatch) -> StepBatch:
        return uneven(batch) if step % 2 else batch

    changes: dict[str, Any] = {"micro_batch": 4, "batch_size": 8, "optimizer": optimizer}
    assert_alike(train(False, alter, **changes), train(True, alter, **changes))


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms", "muon"])
def test_steps_of_many_shapes_share_memory_and_nothing_else(optimizer: str) -> None:
    """Three shapes in turn, each recorded for itself, the largest after a smaller one; then all are replayed."""

    def alter(step: int, batch: StepBatch) -> StepBatch:
        rows = (7, 8, 6, 7, 8, 6)[step]
        micro = [{name: tensor[:rows] for name, tensor in part.items()} for part in batch.micro]
        return StepBatch(micro, sum(int((part["labels"] != -100).sum()) for part in micro), batch.inputs)

    changes: dict[str, Any] = {"micro_batch": 8, "batch_size": 8, "optimizer": optimizer, "config": Varied}
    assert_alike(train(False, alter, **changes), train(True, alter, **changes))


def test_growing_shapes_take_no_more_memory_than_the_largest() -> None:
    """A small T5 on 8 to 64 rows of 128 tokens, the next always larger, against the largest alone."""
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    process_group = ProcessGroup(0, 1, torch.device("cuda", 0))
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "compile": True, "optimizer": "adafactor"}

    def reserved(rows: list[int]) -> float:
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        before = torch.cuda.memory_reserved()
        model = AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("small", "altup"))
        engine = Engine(model, Varied(**settings), process_group)
        for step, n in enumerate(rows):
            micro = {"input_ids": torch.randint(3, 30_000, (n, 128)), "labels": torch.randint(3, 30_000, (n, 32))}
            engine.step(step, StepBatch([micro], n * 32, n * 128), n * 32)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what a graph has used stays
        return (torch.cuda.memory_reserved() - before) / 2**20

    alone, grown = reserved([64]), reserved([8, 16, 24, 32, 40, 48, 56, 64, 8, 24])
    print(f"reserved after one shape {alone:,.0f} MiB, after eight {grown:,.0f} MiB")
    assert grown < 1.25 * alone


@pytest.mark.parametrize("method", ["sequence-altup", "stride-and-skip", "average-pooling"])
def test_strided_models_with_padding_are_replayed(method: str) -> None:
    """They refuse padding on the left; while a graph is recorded nobody can wait for what a mask holds."""

    def alter(step: int, batch: StepBatch) -> StepBatch:
        return padded(batch)

    shape = {"method": method, "num_layers": 4}
    changes: dict[str, Any] = {"micro_batch": 4, "batch_size": 8}
    assert_alike(train(False, alter, shape, **changes), train(True, alter, shape, **changes))


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms", "muon"])
def test_a_replayed_step_without_a_finite_gradient_changes_nothing(optimizer: str) -> None:
    process_group = ProcessGroup(0, 1, torch.device("cuda", 0))
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "compile": True, "optimizer": optimizer}
    torch.manual_seed(0)
    engine = Engine(build(), TrainConfig(**settings), process_group)

    def everything() -> list[torch.Tensor]:
        state = [t for s in engine.optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in [*engine.plain.parameters(), *state]]

    def step(number: int, tokens: float) -> None:
        batch = assemble(MadeUp(), 4, process_group, number)
        engine.step(number, batch, tokens or batch.tokens)

    step(0, 0)
    before = everything()
    step(1, float("nan"))  # the loss is divided by it
    for was, now in zip(before, everything(), strict=True):
        assert torch.equal(was, now)
    step(2, 0)
    assert not torch.equal(before[0], everything()[0])
    assert engine.meter.read(process_group)["skipped"] == 1
