"""A run as its folder or a study's record tells it: curves, figures at the end, speed and config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from altup.core.errors import UserError
from altup.core.hub import missing_folder
from altup.core.schema import read_yaml
from altup.core.text import shorten
from altup.studies.held_out import HeldOutExamples
from altup.studies.jobs import usual_fields
from altup.studies.results import Record, read_record_file
from altup.studies.study import GAINS, METRICS
from altup.training.metrics import read_records
from altup.training.run_folder import RunFolder

REMEDY = "give the folder of a run, or a study's record of one (results/runs/KEY.json)"
LONGEST_NAME = 24  # characters: names stand at the ends of lines
LOSS, ACCURACY, SCORE = "held-out loss", "held-out accuracy (%)", "held-out score"
TRAINING_LOSS = "training loss"
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class MeasuredRun:
    """`curves` and `finals` are by measure; `clock` says how many seconds of training had passed at which step.

    `speed` is the median over the run, in sequences a second, None where it was not kept. `config` also has the
    deciding settings that a record or an older version left out, with their usual values.
    """

    path: Path
    name: str
    config: dict[str, Any]
    step: int
    finished: bool
    curves: dict[str, Points]
    finals: dict[str, float]
    clock: Points = field(default_factory=list)
    speed: float | None = None
    held_out: HeldOutExamples = field(default_factory=HeldOutExamples)

    @property
    def planned(self) -> int | None:
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def seconds(self) -> float | None:
        return self.clock[-1][1] if self.clock else None

    def in_time(self, curve: str) -> Points:
        """A curve over seconds of training; between two records of the time it is interpolated."""
        if len(self.clock) < 2:
            return []
        steps, seconds = zip((0.0, 0.0), *self.clock, strict=True)
        return [
            (float(np.interp(step, steps, seconds)), value)
            for step, value in self.curves.get(curve, [])
            if step <= steps[-1]
        ]


def read_run(path: Path) -> MeasuredRun:
    """The run in a folder, or in the record that a study kept of it."""
    if path.is_file():
        return _from_record(path, read_record_file(path))
    if not path.is_dir():
        raise missing_folder(path, remedy=REMEDY)
    folder = RunFolder(path)
    if not folder.config.exists() or not folder.metrics.exists():
        missing = folder.config if not folder.config.exists() else folder.metrics
        raise UserError(f"{path} is no run: it has no {missing.name}; {REMEDY}")
    config = read_yaml(folder.config)
    records = read_records(folder.metrics)
    if not records:
        raise UserError(f"{path} has no records yet; wait until its run has logged its first steps")
    return _from_folder(folder, config, records)


def _from_folder(folder: RunFolder, config: dict[str, Any], records: list[dict[str, Any]]) -> MeasuredRun:
    train = [record for record in records if record.get("split") == "train"]
    held_out = [record for record in records if record.get("split") == "validation"]
    fields = {LOSS: ("loss", 1.0), ACCURACY: ("accuracy", 100.0), SCORE: ("score", 1.0)}
    tasks = [n for r in held_out if "score" in r for n in r if n not in ("step", "split", "score")]
    fields |= {name: (name, 1.0) for name in dict.fromkeys(tasks)}
    curves = {title: _curve(held_out, name, factor) for title, (name, factor) in fields.items()}
    curves[TRAINING_LOSS] = _curve(train, "loss")
    curves = {title: points for title, points in curves.items() if points}
    speeds = [value for _, value in _curve(train, "seq_per_s")]
    clock, passed = [], 0.0
    for step, seconds in _curve(train, "seconds"):
        passed += seconds
        clock.append((step, passed))
    config = _with_defaults(config)
    return MeasuredRun(
        folder.path,
        folder.path.resolve().name,
        config,
        max(record["step"] for record in records),
        folder.final.is_dir(),
        curves,
        {title: points[-1][1] for title, points in curves.items()},
        clock,
        statistics.median(speeds) if speeds else None,
        HeldOutExamples.of_folder(config),
    )


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    return {**usual_fields(FinetuneConfig if "tasks" in config else PretrainConfig), **config}


def free_settings() -> frozenset[str]:
    """Those that decide nothing but how a run is run and watched; `eval_limit` and `data` say what is measured."""
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    return (PretrainConfig.may_change() | FinetuneConfig.may_change()) - {"eval_limit", "data"}


def _curve(records: list[dict[str, Any]], name: str, factor: float = 1.0) -> Points:
    return [(record["step"], factor * record[name]) for record in records if _is_number(record.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _from_record(path: Path, record: Record) -> MeasuredRun:
    try:
        curves: dict[str, Points] = {}
        if record["kind"] == "pretrain":
            held_out = record["curves"]["held_out"]
            curves = {
                LOSS: [(step, loss) for step, loss, _ in held_out],
                ACCURACY: [(step, accuracy) for step, _, accuracy in held_out],
                TRAINING_LOSS: [(step, loss) for step, loss in record["curves"]["train"]],
            }
        if not all(_is_number(value) for points in curves.values() for point in points for value in point):
            raise TypeError
        named = {"loss": LOSS, "accuracy": ACCURACY}
        finals = {
            named.get(name, METRICS[name].title if name in METRICS else name): float(value)
            for name, value in record["measures"].items()
            if name in GAINS
        }
        seconds = record["measures"].get("train_seconds")
        clock = [(record["step"], float(seconds))] if seconds is not None else []
        name = str(record.get("title") or record["key"])
        told = _with_defaults(record["config"]) if "config" in record else {}  # fine-tuning keeps none
        config = {"hardware": record["hardware"], **told}
        held_out = HeldOutExamples.of_record(record, config)
        return MeasuredRun(path, name, config, int(record["step"]), True, curves, finals, clock, held_out=held_out)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a whole record of a run; put a whole copy in its place") from None


def distinct_names(runs: Sequence[MeasuredRun]) -> list[str]:
    """A short name for each: its own, or where that is long the words that not all have; numbers tell equal ones
    apart."""
    names = [run.name for run in runs]
    if max(map(len, names)) > LONGEST_NAME:
        words = [name.split() for name in names]
        common = set(words[0]).intersection(*words[1:])
        names = [
            " ".join(w for w in own if w not in common) or name for own, name in zip(words, names, strict=True)
        ]
    names = [shorten(name, LONGEST_NAME) for name in names]
    if len(set(names)) == len(names):
        return names
    return [shorten(f"{number} {name}", LONGEST_NAME) for number, name in enumerate(names, start=1)]
