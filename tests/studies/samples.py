"""Results, records and a small study, made up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altup.core.schema import parse_yaml
from altup.studies.jobs import Job, file_name
from altup.studies.results import Record, Result, ResultFolders
from altup.studies.run import StudyRun
from altup.studies.scale import Scale
from altup.studies.statistics import Statistics, choose_results
from altup.studies.study import METRICS, Study, build_study

TEXT = (
    "title: Two\nquestion: Which?\nrows:\n  Dense: {method: dense}\n  AltUp K=2: {method: altup, k: 2}\n"
    "expect: [{better: AltUp K=2, than: Dense}]\n"
)
NOTHING = ResultFolders([])


def read_study(text: str, name: str = "own") -> Study:
    return build_study(name, parse_yaml(text, name), name)


TWO = read_study(TEXT, "two")


def result(label: str, value: float, seed: str = "0", metric: str = "accuracy", **changes: Any) -> Result:
    fields = {
        "study": "varying-k", "label": label, "size": "small", "seed": seed, "scale": "mini", "data": "text",
        "model": label if seed else "", "setup": "model t5, inputs_length 512", "length": "2,000 steps of 128",
        "budget": "", "metric": metric, "value": value, "unit": METRICS[metric].unit, "step": "2000",
        "run": file_name(f"{label}-{seed}-{metric}"),
        "hardware": "H200", "versions": "torch", "date": "2025-01-01", "command": "altup study run",
    }  # fmt: skip
    return Result(**{**fields, **changes})


def statistics(results: Sequence[Result], study: str = "varying-k", scale: str | None = None) -> Statistics:
    return choose_results(results, study, scale)


def record(key: str, **changes: Any) -> Record:
    fields = {"kind": "pretrain", "title": f"record {key}", "step": 1, "measures": {}, "config": {}}
    origin = {"hardware": "H200", "versions": "torch", "date": "2025-01-01"}
    return {"key": key, **fields, **origin, "curves": {"held_out": [], "train": []}, "coefficients": {}, **changes}


# dense 40, 41 (variance 0.5), K=2 42, 44 (variance 2), K=4 43 alone.
SEEDS = [
    result("Dense", 40.0, "0"), result("Dense", 41.0, "1"), result("AltUp K=2", 42.0, "0"),
    result("AltUp K=2", 44.0, "1"), result("AltUp K=4", 43.0, "0"),
]  # fmt: skip


def study_run(out: Path, scale: Scale, data: Path, *studies: Study, **changes: Any) -> StudyRun:
    fields = {"results": out / "results", "seeds": [0], "data": str(data), "speed": False, **changes}
    return StudyRun(studies or [TWO], scale, out, **fields)


def first_jobs(out: Path, scale: Scale, data: Path, *studies: Study, **changes: Any) -> list[Job]:
    """What a study that has not begun runs first."""
    return study_run(out, scale, data, *studies, **changes).plan.todo()


def silent(text: str) -> None:
    pass
