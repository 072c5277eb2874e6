"""Training with --precision fp8: it learns as bf16 does, resumes exactly, and is told in the run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from altup.core.errors import UserError
from altup.training.config import TrainConfig
from altup.training.metrics import read_records
from altup.training.parallel import ProcessGroup
from tests.training.compare import assert_same_run
from tests.training.tiny import run


def last_loss(out: Path) -> float:
    return [record["loss"] for record in read_records(out / "metrics.jsonl") if record["split"] == "validation"][
        -1
    ]


def test_it_learns_as_bf16_does(tmp_path: Path) -> None:
    settings = {"steps": 60, "eval_every": 60, "save_every": 60, "model": {"dropout_rate": 0.0}}
    losses = {}
    for precision in ("bf16", "fp8"):
        run(tmp_path / precision, precision=precision, **settings)
        losses[precision] = last_loss(tmp_path / precision)
        assert f"precision: {precision}\n" in (tmp_path / precision / "config.yaml").read_text()
    assert losses["fp8"] != losses["bf16"]
    assert abs(losses["fp8"] - losses["bf16"]) < 0.15
    assert losses["fp8"] < 2.5  # it began at 3.7


def test_a_stopped_run_resumes_exactly(tmp_path: Path) -> None:
    settings = {"precision": "fp8", "steps": 6, "micro_batch": 4}
    run(tmp_path / "whole", **settings)
    assert run(tmp_path / "cut", stop_after=5, **settings).step == 3
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 6)


def test_a_run_in_another_precision_is_another_run() -> None:
    config = TrainConfig(precision="fp8")
    assert config.low_precision
    assert config.difference(TrainConfig(precision="bf16")) == {"precision": ("fp8", "bf16")}
    with pytest.raises(UserError, match="fp16"):
        TrainConfig(precision="fp16")


@pytest.mark.gpu
def test_a_recorded_step_on_a_gpu_repeats_exactly_and_learns(tmp_path: Path) -> None:
    group = ProcessGroup(0, 1, torch.device("cuda", 0))
    fields = {"d_model": 64, "d_ff": 128, "d_kv": 32}
    settings = {"process_group": group, "steps": 60, "eval_every": 60, "save_every": 30, "model": fields}
    for precision in ("bf16", "fp8"):
        run(tmp_path / precision, precision=precision, **settings)
    assert abs(last_loss(tmp_path / "fp8") - last_loss(tmp_path / "bf16")) < 0.2
    run(tmp_path / "again", precision="fp8", **settings)
    assert_same_run(tmp_path / "fp8", tmp_path / "again", 60)
