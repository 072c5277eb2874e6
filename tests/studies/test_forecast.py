"""What a run would cost, counted before anything is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from altup.studies.forecast import Line, forecast
from altup.studies.run import StudyRun, find_device
from altup.studies.scale import Scale, Tuning, find_scale
from altup.studies.study import Study, read_study, shipped
from tests.studies.samples import TEXT, TWO, study_run


@pytest.fixture(scope="module")
def tuned() -> Scale:
    return replace(find_scale("smoke"), tune=Tuning({"lr": [0.01, 0.02, 0.03]}, steps=3), seeds=[1, 2])


def lines_of(run: StudyRun) -> list[Line]:
    return forecast(run, run.plan(), find_device("H200"))


def test_fine_tuning_is_counted_before_its_models_are_tuned(tuned: Scale, data: Path, tmp_path: Path) -> None:
    """Once for a model that two studies have, though only one of them fine-tunes it."""
    with_tasks = replace(TWO, finetune=("glue", "squad"), finetune_at=("smoke",))
    other = read_study("other", TEXT, "other")

    def look(studies: list[Study], scale: Scale) -> list[Line]:
        run = study_run(tmp_path / "out", scale, data, seeds=[1, 2], tasks=str(tmp_path))
        return lines_of(replace(run, studies=studies))

    lines = look([other, with_tasks, other], tuned)
    assert [line.runs for line in lines if "tuning" in line.title] == [3, 3]
    fine_tuned = [line for line in lines if line.title.endswith((" on glue", " on squad"))]
    assert len(fine_tuned) == len({line.title for line in fine_tuned}) == 2 * 2 * 2
    assert {line.steps for line in fine_tuned} == {"4"}
    assert all(line.seconds > 0 for line in fine_tuned)
    assert len(lines) == 2 + 4 + 8
    untuned = look([other, with_tasks, other], replace(tuned, tune=None))  # as many as there will be
    assert len(untuned) == 4 + 8


def test_what_models_go_on_from_is_counted(tuned: Scale, data: Path, tmp_path: Path) -> None:
    """Also where the row itself is not asked for, and once more for the sweeps, which have a seed of their own."""
    study = shipped()["continuing"]
    run = study_run(tmp_path / "out", tuned, data, study, seeds=[1, 2], dry=True)
    every = lines_of(run)
    # Dense, and the three that go on, are tuned; 6 rows with 2 seeds, the sweeps' own dense model, and the speeds.
    assert [line.runs for line in every if "tuning" in line.title] == [3, 3, 3, 3]
    assert len(every) == 4 + 6 * 2 + 1 + 1
    assert [line.title for line in every if "seed 0" in line.title] == ["tiny dense 10 steps seed 0"]
    assert sum(line.steps == "by its speed" for line in every) == 4
    alone = lines_of(replace(run, only=["AltUp K=2"]))
    dense = [line.title for line in alone if line.title.startswith("tiny dense 10 steps")]
    assert dense == [f"tiny dense 10 steps seed {seed}" for seed in (0, 1, 2)]
    assert [line.title.partition(":")[0] for line in alone if "tuning" in line.title] == [
        "tuning tiny dense",
        "tuning tiny altup K=2, going on",
    ]
