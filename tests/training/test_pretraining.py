"""`pretrain`: what joins data, model and loop, and how a run tells that one of them has changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.training.checkpoints import read_state
from altup.training.pretraining import PretrainConfig, pretrain
from tests.processes import prepare_text

SMALL: dict[str, Any] = {
    "size": "tiny", "model_overrides": {"d_model": 16, "d_ff": 32, "num_layers": 1}, "inputs_length": 32,
    "batch_size": 4, "steps": 4, "log_every": 2, "eval_every": 4, "eval_sequences": 6, "save_every": 2,
    "precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain(PretrainConfig(data=str(data), **SMALL), out).finished
    return out


@pytest.fixture
def stopped(trained: Path, tmp_path: Path) -> Path:
    """The run as it was after two of its four steps."""
    out = tmp_path / "stopped"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "final")
    shutil.rmtree(out / "checkpoints/step-4")
    return out


def test_a_checkpoint_is_sealed_with_its_model_and_data(trained: Path, stopped: Path, data: Path) -> None:
    """A run of another width, or on other text, does not go on from it, whatever became of config.yaml."""
    (stopped / "config.yaml").unlink()
    for name, other in (
        ("size", {"size": "small"}),
        ("model_overrides.d_model", {"model_overrides": {"d_model": 32, "d_ff": 32, "num_layers": 1}}),
        ("batches.data", {"data": str(prepare_text(stopped.parent, sentences=3000))}),
    ):
        config = PretrainConfig(**{"data": str(data), **SMALL, **other})
        with pytest.raises(UserError, match=rf"(?s)other settings or data than those of now:.*\n  {name}: "):
            pretrain(config, stopped, resume=True)
    sealed = read_state(trained / "checkpoints/step-4").config
    assert sealed is not None
    assert sealed["batches"]["data"]
    moved = data.with_name("moved")
    shutil.copytree(data, moved)
    assert pretrain(PretrainConfig(data=str(moved), **SMALL), stopped, resume=True).finished
