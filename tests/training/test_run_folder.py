"""A run's folder: who may start or go on in it, and which model it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from altup.core.errors import UserError
from altup.training.metrics import cut_after, read_records
from altup.training.pretraining import PretrainConfig
from altup.training.run_folder import RunFolder, newest_model
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


def test_of_changed_data_only_the_changed_part_is_told(tmp_path: Path) -> None:
    there = PretrainConfig(
        data="data", batches={"tasks": {"cola": {"sha256": "a" * 64, "examples": 9}}, "seed": 0}
    )
    now = PretrainConfig(data="data", batches={"tasks": {"cola": {"sha256": "a" * 64, "examples": 8}}, "seed": 0})
    with pytest.raises(UserError, match=r"config:\n  batches.tasks.cola.examples: 9 there, 8 now\nchoose"):
        RunFolder(tmp_path)._check_same(there, now, resume=True)


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
    with pytest.raises(UserError, match=r"holds 'thesis\.txt' and no run"):
        run(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        run(tmp_path / "thesis.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_another_project_are_left_alone(tmp_path: Path, resume: bool) -> None:
    for name, content in (("config.yaml", "name: mine\n"), ("README.md", "# Mine\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=r"unknown key 'name'|holds 'README.md'"):
            run(tmp_path, resume=resume)
        assert (tmp_path / name).read_text() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.yaml"]


def test_a_second_process_changes_nothing(tmp_path: Path) -> None:
    """It comes while the first one is in the middle of a save."""
    seen = []

    class Second:
        def record(self, values: dict) -> None:
            if values["split"] == "train" and values["step"] == 3:
                half = tmp_path / "checkpoints" / ".unfinished-step-5"
                half.mkdir()
                before = (tmp_path / "config.yaml").read_text()
                with pytest.raises(UserError, match="another process is training"):
                    run(tmp_path, resume=True, log_every=7)
                assert half.is_dir()
                assert (tmp_path / "config.yaml").read_text() == before
                seen.append(True)

        def close(self) -> None:
            pass

    loop = tiny_loop(tmp_path, steps=3)
    loop.sinks = [Second()]
    assert loop.run().finished
    assert seen == [True]


def test_a_longer_run_killed_before_its_final_model_makes_it_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_end = {"schedule": "constant", "decay_fraction": 0.0}
    run(tmp_path, steps=3, **open_end)
    old = (tmp_path / "final" / "model.safetensors").read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("altup.training.checkpoints.save_final", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, steps=6, resume=True, **open_end)
    assert run(tmp_path, steps=6, resume=True, **open_end).finished
    new = (tmp_path / "final" / "model.safetensors").read_bytes()
    assert new != old
    assert new == (tmp_path / "checkpoints" / "step-6" / "model.safetensors").read_bytes()


def test_fewer_steps_than_were_done_are_refused(tmp_path: Path) -> None:
    open_end = {"schedule": "constant", "decay_fraction": 0.0}
    run(tmp_path, steps=6, **open_end)
    with pytest.raises(UserError, match="steps=3 is less than the 6"):
        run(tmp_path, steps=3, resume=True, **open_end)
    assert "steps: 6" in (tmp_path / "config.yaml").read_text()


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


@pytest.mark.parametrize("line", ['{"step": null}', "[]", "{", "[" * 100_000, '{"loss": 1}', "\x00"])
def test_records_that_are_none_are_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    assert [record["step"] for record in read_records(path)] == [1, 3]
    cut_after(path, 2)
    assert path.read_text() == '{"step": 1}\n'
