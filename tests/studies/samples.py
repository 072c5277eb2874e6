"""Results, records and a small study, made up by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altup.studies.jobs import StudyData, file_name
from altup.studies.plan import Plan, make_plan
from altup.studies.results import Record, Result
from altup.studies.run import StudyRun
from altup.studies.scale import Scale
from altup.studies.study import Study, read_study

TEXT = (
    "title: Two\nquestion: Which?\nrows:\n  Dense: {method: dense}\n  AltUp K=2: {method: altup, k: 2}\n"
    "expect: [{better: AltUp K=2, than: Dense}]\n"
)
TWO = read_study("two", TEXT, "two")


def result(label: str, value: float, seed: str = "0", metric: str = "accuracy", **changes: Any) -> Result:
    fields = {
        "study": "varying-k", "label": label, "size": "small", "seed": seed, "scale": "mini", "data": "text",
        "metric": metric, "value": value, "unit": "%", "step": "2000",
        "run": file_name(f"{label}-{seed}-{metric}"),
        "hardware": "H200", "versions": "torch", "date": "2025-01-01", "command": "altup study run",
    }  # fmt: skip
    return Result(**{**fields, **changes})


def record(key: str, **changes: Any) -> Record:
    fields = {"kind": "pretrain", "step": 1, "measures": {}, "hardware": "H200", "versions": "torch"}
    return {
        "key": key,
        **fields,
        "date": "2025-01-01",
        "curves": {"held_out": [], "train": []},
        "coefficients": {},
        **changes,
    }


# dense 40, 41 (variance 0.5), K=2 42, 44 (variance 2), K=4 43 alone.
SEEDS = [
    result("Dense", 40.0, "0"), result("Dense", 41.0, "1"), result("AltUp K=2", 42.0, "0"),
    result("AltUp K=2", 44.0, "1"), result("AltUp K=4", 43.0, "0"),
]  # fmt: skip


def study_run(out: Path, scale: Scale, data: Path, study: Study = TWO, **changes: Any) -> StudyRun:
    fields = {"results": out / "results", "seeds": [0], "data": str(data), "speed": False, **changes}
    return StudyRun([study], scale, out, **fields)


def plan(studies: list[Study], scale: Scale, data: Path, tasks: Path | None = None, **changes: Any) -> Plan:
    fields = {"seeds": [0], "speeds": {}, "chosen_steps": lambda *place: None, "machine": "here", **changes}
    return make_plan(studies, scale, StudyData.prepared(str(data), str(tasks) if tasks else None), **fields)
