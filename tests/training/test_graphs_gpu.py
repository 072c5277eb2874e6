"""Steps replayed as CUDA graphs against the same steps launched one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from altup.training.config import TrainConfig
from altup.training.determinism import numerics
from altup.training.engine import Engine
from altup.training.parallel import Processes
from altup.training.prefetch import assemble
from tests.training.tiny import SETTINGS, MadeUp, build

pytestmark = pytest.mark.gpu


def train(graphs: bool, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    mine = Processes(0, 1, torch.device("cuda", 0))
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "compile": True, **changes}
    torch.manual_seed(0)
    model = build()  # with dropout
    engine = Engine(model, TrainConfig(**settings), mine)
    if not graphs:
        engine._graphs = None
    else:
        assert engine._graphs is not None
    with numerics(True, True):  # AdamW would turn rounding of small gradients into steps
        for step in range(6):
            batch = assemble(MadeUp(), settings["micro_batch"], mine, step)
            engine.step(step, batch, batch.tokens)
    return {n: p.detach().cpu() for n, p in engine.plain.named_parameters()}, engine.meter.read(mine)


@pytest.mark.parametrize("micro_batch", [8, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms"])
def test_replayed_steps_train_as_launched_ones_do(
    micro_batch: int, clip_norm: float | None, optimizer: str
) -> None:
    """Dropout, accumulation and clipping included."""
    changes = {"micro_batch": micro_batch, "clip_norm": clip_norm, "batch_size": 8, "optimizer": optimizer}
    (want, want_metrics), (got, got_metrics) = (train(graphs, **changes) for graphs in (False, True))
    assert got_metrics == pytest.approx(want_metrics, rel=1e-4)
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "adamw-rms"])
def test_a_replayed_step_without_a_finite_gradient_changes_nothing(optimizer: str) -> None:
    mine = Processes(0, 1, torch.device("cuda", 0))
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "compile": True, "optimizer": optimizer}
    torch.manual_seed(0)
    engine = Engine(build(), TrainConfig(**settings), mine)

    def everything() -> list[torch.Tensor]:
        state = [t for s in engine.optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in [*engine.plain.parameters(), *state]]

    def step(number: int, tokens: float) -> None:
        batch = assemble(MadeUp(), 4, mine, number)
        engine.step(number, batch, tokens or batch.tokens)

    step(0, 0)
    before = everything()
    step(1, float("nan"))  # the loss is divided by it
    for was, now in zip(before, everything(), strict=True):
        assert torch.equal(was, now)
    step(2, 0)
    assert not torch.equal(before[0], everything()[0])
    assert engine.meter.read(mine)["skipped"] == 1
