"""A run that was stopped and resumed ends as the one that never was: weights, optimizer, metrics, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from altup.training.metrics import CHAIN
from tests.training.compare import assert_same_run, records
from tests.training.tiny import run

STEPS = 12


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(out).finished
    return out


@pytest.mark.parametrize("k", [1, 3, 4, 5, 7, 10, 11])
def test_resumed_after_k_steps(never_stopped: Path, tmp_path: Path, k: int) -> None:
    """Stops within a log window, at logs, evaluations, saves and epoch ends (every 5 steps)."""
    stopped = run(tmp_path, stop_after=k)
    assert (stopped.step, stopped.finished) == (k, False)
    assert (tmp_path / "checkpoints" / f"step-{k}").is_dir()
    assert not (tmp_path / "final").exists()
    finished = run(tmp_path, resume=True)
    assert (finished.step, finished.finished) == (STEPS, True)
    assert_same_run(never_stopped, tmp_path, STEPS)


def test_resumed_twice(never_stopped: Path, tmp_path: Path) -> None:
    assert run(tmp_path, stop_after=2).step == 2
    assert run(tmp_path, resume=True, stop_after=6).step == 8
    assert run(tmp_path, resume=True).finished
    assert_same_run(never_stopped, tmp_path, STEPS)


def test_resumed_with_accumulation(tmp_path: Path) -> None:
    """The signal comes in the middle of a step (its 14th micro-batch of 4 a step): the step is finished."""
    run(tmp_path / "whole", micro_batch=2)
    assert run(tmp_path / "cut", micro_batch=2, stop_after=14).step == 4
    run(tmp_path / "cut", micro_batch=2, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", STEPS)


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("adamw", {}),
        ("adamw-rms", {}),
        ("muon", {}),
        ("muon", {"muon_by": "block"}),
        ("muon", {"coefficient_decay": 4.0}),
    ],
)
def test_resumed_with_other_optimizers(tmp_path: Path, optimizer: str, more: dict[str, Any]) -> None:
    settings = {"optimizer": optimizer, "schedule": "cosine", "lr": 1e-2, "steps": 6, "clip_norm": 1.0, **more}
    run(tmp_path / "whole", **settings)
    run(tmp_path / "cut", stop_after=4, **settings)
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 6)


def test_half_written_and_later_records_are_cut(never_stopped: Path, tmp_path: Path) -> None:
    """A killed run leaves records of steps that will be repeated, and half a line."""
    run(tmp_path, stop_after=6)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "split": "train", "loss": 7.0}\n{"step": 9, "split": "va')
    run(tmp_path, resume=True)
    assert records(tmp_path) == records(never_stopped)


def test_a_cut_metrics_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once: the next checkpoint knows how many records there are. A run that is finished is told as well."""
    metrics = tmp_path / "metrics.jsonl"
    run(tmp_path, stop_after=6)
    lines = metrics.read_text().splitlines(keepends=True)
    assert len(lines) == 3  # steps 3, 4 and 6
    with metrics.open("a") as file:
        file.write('{"step": 7, "split": "tr')  # what a kill leaves is no loss
    run(tmp_path, resume=True, stop_after=1)
    assert "records" not in caplog.text
    metrics.write_text(lines[0] + lines[1][:20])
    run(tmp_path, resume=True, stop_after=1)
    assert caplog.text.count("metrics.jsonl: of 3 records up to step 7 only 1 are left as they") == 1
    run(tmp_path, resume=True)
    assert caplog.text.count("are left") == 1
    metrics.write_text("")
    assert run(tmp_path, resume=True).finished
    assert "records up to step 12 only 0 are left" in caplog.text


def edit(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], object]:
    """Change the lines of a metrics file."""

    def harm(path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return harm


# How the file is changed, and what is said of it. A doubled line is dropped, and nothing is lost.
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a better loss": (edit(lambda lines: lines[0].update(loss=0.5)), "only 2 are left as they were written"),
    "without its link": (edit(lambda lines: lines[0].pop(CHAIN)), "only 1 are left as they were written"),
    "twice": (edit(lambda lines: lines.insert(1, lines[1])), ""),
    "moved": (edit(lambda lines: lines.insert(0, lines.pop(1))), "only 0 are left as they were written"),
    "one less": (edit(lambda lines: lines.pop(0)), "only 1 are left as they were written"),
    "no links": (edit(lambda lines: [line.pop(CHAIN) for line in lines]), "only 0 are left as they were written"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_changed_metrics_file_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str) -> None:
    """And no loss that was never reached counts."""
    spoil, message = HARMS[harm]
    run(tmp_path, stop_after=6)
    before = records(tmp_path)
    spoil(tmp_path / "metrics.jsonl")
    assert all(record in before for record in records(tmp_path))
    assert len(records(tmp_path)) <= len(before)
    run(tmp_path, resume=True)
    assert message in caplog.text
    assert bool(message) == ("metrics.jsonl: " in caplog.text)


def test_a_damaged_checkpoint_is_passed_over(
    never_stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, stop_after=8)
    weights = tmp_path / "checkpoints" / "step-8" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    run(tmp_path, resume=True)
    assert "step-8" in caplog.text
    assert_same_run(never_stopped, tmp_path, STEPS)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.safetensors"))}
    again = run(tmp_path, steps=3, resume=True)
    assert again.finished
    assert again.step == 3
    assert before == {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.safetensors"))}


def test_resume_without_a_run_starts_one(never_stopped: Path, tmp_path: Path) -> None:
    """So that a job that is restarted for ever can always be given --resume."""
    run(tmp_path / "new", resume=True)
    assert_same_run(never_stopped, tmp_path / "new", STEPS)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(tmp_path: Path) -> None:
    run(tmp_path, stop_after=8)
    for weights in tmp_path.glob("checkpoints/step-*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        run(tmp_path, resume=True)
