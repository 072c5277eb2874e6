"""A run's folder: who may start or go on in it, and which model it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from altup.errors import UserError
from altup.training.run import newest_model
from tests.training.compare import records
from tests.training.tiny import run, tiny_loop


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    before = (tmp_path / "config.yaml").read_text()
    for resume in (False, True):
        with pytest.raises(UserError, match=r"(?s)another config.*lr: 0.02 there, 0.5 now") as caught:
            run(tmp_path, resume=resume, steps=3, lr=0.5)
        assert "seed" not in str(caught.value)
    assert (tmp_path / "config.yaml").read_text() == before


def test_the_same_config_needs_resume(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    with pytest.raises(UserError, match="already holds this run; add --resume"):
        run(tmp_path, steps=3)


def test_a_run_that_never_began_is_not_in_the_way(tmp_path: Path) -> None:
    """A first try that failed before its first record may be corrected."""

    def fails(checkpoint: Path | None) -> torch.nn.Module:
        raise UserError("no such model")

    loop = tiny_loop(tmp_path, steps=3, lr=0.5)
    loop.build_model = fails
    with pytest.raises(UserError, match="no such model"):
        loop.run()
    assert run(tmp_path, steps=3).finished


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty and holds no run"):
        run(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "thesis.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_run_can_be_made_longer_while_its_schedule_allows(tmp_path: Path) -> None:
    """Five steps, then five more, are ten steps."""
    open_end = {"schedule": "constant", "decay_fraction": 0.0, "log_every": 5, "eval_every": 5}
    run(tmp_path / "ten", steps=10, **open_end)
    run(tmp_path / "five", steps=5, **open_end)
    assert run(tmp_path / "five", steps=10, resume=True, **open_end).step == 10
    assert records(tmp_path / "five") == records(tmp_path / "ten")


def test_the_newest_model_of_a_run(tmp_path: Path) -> None:
    run(tmp_path / "done", steps=3)
    run(tmp_path / "cut", stop_after=7)
    assert newest_model(tmp_path / "done").name == "final"
    assert newest_model(tmp_path / "done" / "final").name == "final"
    assert newest_model(tmp_path / "cut").name == "step-7"
    (tmp_path / "cut/checkpoints/step-7/model.safetensors").write_bytes(b"")
    assert newest_model(tmp_path / "cut").name == "step-5"
    with pytest.raises(UserError, match="neither a model folder"):
        newest_model(tmp_path)
