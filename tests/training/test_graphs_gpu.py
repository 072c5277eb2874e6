"""Steps replayed as CUDA graphs against the same steps launched one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from altup.training.config import TrainConfig
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
    for step in range(6):
        batch = assemble(MadeUp(), settings["micro_batch"], mine, step)
        engine.step(step, batch, batch.tokens)
    return {n: p.detach().cpu() for n, p in engine.plain.named_parameters()}, engine.meter.read(mine)


@pytest.mark.parametrize("micro_batch", [8, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_replayed_steps_train_as_launched_ones_do(micro_batch: int, clip_norm: float | None) -> None:
    """Dropout, accumulation and clipping included."""
    changes = {"micro_batch": micro_batch, "clip_norm": clip_norm, "batch_size": 8}
    (want, want_metrics), (got, got_metrics) = (train(graphs, **changes) for graphs in (False, True))
    assert got_metrics == pytest.approx(want_metrics, rel=1e-4)
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-3, atol=1e-4, msg=name)
