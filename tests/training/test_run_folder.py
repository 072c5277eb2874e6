"""A run's folder: who may start or go on in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from altup.core.errors import UserError
from altup.core.sealed_folders import damage
from altup.training.config import TrainConfig
from altup.training.metrics import cut_after, read_records
from altup.training.pretraining import PretrainConfig
from altup.training.run_folder import RunFolder
from tests.training.compare import assert_same_run, records
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
        RunFolder(tmp_path)._check_same(there, now)


def test_the_same_config_needs_resume(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    with pytest.raises(UserError, match="already holds this run; add --resume"):
        run(tmp_path, steps=3)


@pytest.mark.parametrize("other", [{"lr": 0.5}, {"seed": 1}, {"clip_norm": 1.0}])
def test_a_checkpoint_belongs_to_its_settings(tmp_path: Path, other: dict[str, Any]) -> None:
    """Whether config.yaml was deleted or edited: what the weights come from is in the checkpoint."""
    run(tmp_path, steps=6, stop_after=3)
    path, ((name, value),) = tmp_path / "config.yaml", other.items()
    config = yaml.safe_load(path.read_text())
    path.unlink()
    with pytest.raises(UserError, match=r"config\.yaml is missing; add --resume"):
        run(tmp_path, steps=6, **other)
    told = (
        rf"(?s)step-3 was trained with other settings.*  {name}: {config[name]} there, {value} now\nput them back"
    )
    with pytest.raises(UserError, match=told):
        run(tmp_path, resume=True, steps=6, **other)
    assert not path.exists()
    path.write_text(yaml.safe_dump({**config, **other}))
    with pytest.raises(UserError, match=told):
        run(tmp_path, resume=True, steps=6, **other)
    path.unlink()
    assert run(tmp_path, resume=True, steps=6).finished
    assert yaml.safe_load(path.read_text()) == config


def test_settings_of_watching_may_be_edited(tmp_path: Path) -> None:
    """They decide no weight, and neither do more steps while the rate does not depend on their number."""
    open_end = {"schedule": "constant", "decay_fraction": 0.0}
    run(tmp_path, steps=6, stop_after=3, **open_end)
    other = {"eval_every": 2, "save_every": 1, "keep_last": 1, "micro_batch": 4, "steps": 7, **open_end}
    assert run(tmp_path, resume=True, **other).step == 7


class At:
    """Does something when a step is recorded, as another process might meanwhile."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action

    def record(self, values: dict[str, Any]) -> None:
        if values["step"] == self.step and values["split"] == "train":
            self.action()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_whose_folder_is_removed_stops(tmp_path: Path, step: int) -> None:
    """In the middle, and in its last step; it does not make the folder anew."""
    loop = tiny_loop(tmp_path / "run", steps=6, save_every=2)
    loop.sinks = [At(step, lambda: shutil.rmtree(tmp_path / "run"))]
    with pytest.raises(UserError, match=r"run: the folder or its lock \(.lock\) was removed"):
        loop.run()
    assert not list(tmp_path.iterdir())


def test_a_run_without_its_lock_leaves_the_folder_to_others(tmp_path: Path) -> None:
    """The new run in its place is as if there had been no other."""
    run(tmp_path / "whole", steps=5)
    place = tmp_path / "run"

    def replace() -> None:
        shutil.rmtree(place)
        run(place, steps=5)

    for name, action in (("moved", lambda: place.rename(tmp_path / "moved")), ("run", replace)):
        loop = tiny_loop(place, steps=6, lr=0.5, save_every=1)
        loop.sinks = [At(3, action)]
        with pytest.raises(UserError, match="writes nothing more"):
            loop.run()
        assert (tmp_path / name).is_dir()
    assert [path.name for path in sorted((tmp_path / "moved/checkpoints").iterdir())] == ["step-1", "step-2"]
    assert_same_run(tmp_path / "whole", place, 5)


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


def test_a_damaged_final_model_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, steps=3)
    final, last = tmp_path / "final", tmp_path / "checkpoints/step-3"
    whole = (final / "model.safetensors").read_bytes()

    def flip() -> None:
        (final / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    def use_another() -> None:
        run(tmp_path.with_name("another"), steps=2)
        shutil.rmtree(final)
        shutil.copytree(tmp_path.with_name("another") / "final", final)

    for harm, told in (
        (flip, "the contents of model.safetensors have changed"),
        ((final / "config.json").unlink, "config.json cannot be read"),
        (lambda: shutil.rmtree(final), "it is missing"),
        (use_another, "it is not the model of step-3"),
    ):
        harm()
        assert run(tmp_path, steps=3, resume=True).finished
        assert f"{told}" in caplog.text
        assert "it is made again from step-3" in caplog.text
        assert (final / "model.safetensors").read_bytes() == whole == (last / "model.safetensors").read_bytes()
        assert damage(final) is None
        caplog.clear()
    assert run(tmp_path, steps=3, resume=True).finished
    assert not caplog.text


@pytest.mark.parametrize("finished", [False, True])
def test_checkpoints_that_a_kill_left_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    """It came between a save and the pruning after it."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    settings = {"steps": 4 if finished else 5, "save_every": 1, "eval_every": 2, "keep_last": 1}
    with monkeypatch.context() as patched:
        patched.setattr("altup.training.checkpoints.prune", lambda *_: None)
        patched.setattr("altup.training.checkpoints.save_final", killed)
        if finished:
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, **settings)
        else:
            run(tmp_path, stop_after=4, **settings)
    loop = tiny_loop(tmp_path, **settings)
    seen: list[set[str]] = []
    make = loop.build_model

    def look(checkpoint: Path | None) -> torch.nn.Module:
        seen.append({path.name for path in (tmp_path / "checkpoints").iterdir()})
        return make(checkpoint)

    loop.build_model = look
    assert loop.run(resume=True).finished
    assert seen == [{"step-4"}]  # the newest, and the best


def test_a_finished_run_may_be_extended(tmp_path: Path) -> None:
    """By more steps of a rate that follows their new number; killed on the way, it ends with the same bits."""
    falling = {"schedule": "cosine"}
    for name in ("whole", "killed"):
        run(tmp_path / name, steps=4, **falling)
    with pytest.raises(UserError, match="already holds this run"):
        run(tmp_path / "whole", steps=8, **falling)
    assert run(tmp_path / "whole", steps=8, resume=True, **falling).step == 8
    assert not run(tmp_path / "killed", steps=8, resume=True, stop_after=2, **falling).finished
    with pytest.raises(UserError, match="steps: 8 there, 9 now"):
        run(tmp_path / "killed", steps=9, resume=True, **falling)
    assert run(tmp_path / "killed", steps=8, resume=True, **falling).finished
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 8)
    with pytest.raises(UserError, match="steps=5 is less than the 8"):
        run(tmp_path / "whole", steps=5, resume=True, **falling)


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


@pytest.mark.parametrize("line", ['{"step": null}', "[]", "{", "[" * 100_000, '{"loss": 1}', "\x00"])
def test_records_that_are_none_are_left_out(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    assert [record["step"] for record in read_records(path)] == [1, 3]
    cut_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


def test_records_that_no_run_has_written_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"step": None, "split": "train"}, {"step": 2}, {"step": 3, "split": ["train"]}, [],
        {"step": 4, "split": "validation", "loss": "low", "accuracy": {}, "score": None},
        {"step": 5, "split": "train", "loss": 1.5, "skipped": 0},
        {"step": 6, "split": "failed evaluation", "error": "no memory"},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"step": 2, "split": ""},
        {"step": 3, "split": ""},
        {"step": 4, "split": "validation", "score": None},
        lines[5],
        lines[6],
    ]


def test_an_empty_config_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# nothing\n")
    with pytest.raises(UserError, match=r"config\.yaml is empty; write `name: value` lines"):
        TrainConfig.resolve({}, tmp_path / "config.yaml", {"steps": 4})
    with pytest.raises(UserError, match=r"config\.yaml is empty; restore it, or remove it"):
        RunFolder(tmp_path).saved_settings(resume=True)
