"""Runs side by side, whatever they trained: measures, curves, speed, and the settings in which they differ."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from altup.core.errors import UserError
from altup.core.files import atomic_write, refuse_foreign
from altup.core.hub import missing_folder
from altup.core.schema import LONG, read_yaml
from altup.core.text import duration, shorten, signed
from altup.studies.charts import Series, line_chart
from altup.studies.jobs import MEASURED_ON, default_settings, identify_text
from altup.studies.pages import Figure, render, title_mark
from altup.studies.results import read_record
from altup.studies.study import GAINS, METRICS
from altup.studies.tables import Cell, Column, Table
from altup.training.metrics import read_records
from altup.training.run_folder import RunFolder

TITLE = "altup compare: runs side by side"  # by which its page is known
REMEDY = "give the folder of a run, or a study's record of one (results/runs/KEY.json)"
MOST_RUNS = 14  # that a chart has room to name
LONGEST_NAME = 24  # characters: names stand at the ends of lines
PALETTE = 7
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 16  # characters of a curve in the terminal
UNSET = "–"
LOSS, ACCURACY, SCORE = "held-out loss", "held-out accuracy (%)", "held-out score"
TRAINING_LOSS = "training loss"
DIGITS = {LOSS: 4, TRAINING_LOSS: 4}  # after the point; two otherwise
OPTIONAL = ("hardware", "batches", "data")  # that not every folder or record has
OF_BATCHES = ("data", "tokenizer", "sha256", "examples")  # what a config's `batches` alone says
HASH = re.compile(r"[0-9a-f]{40,64}")
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class HeldOut:
    """What a run was measured on: its folder's own description, the identity of the text or tasks, and the
    settings that decide which examples are made of them, as far as they are known."""

    described: Any = None
    identity: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def same_as(self, other: HeldOut) -> bool | None:
        """Whether measures compare; None where it is not known. Other training text does not mean other held-out
        text, so unequal identities say nothing."""
        if self.described is not None and other.described is not None:
            return bool(self.described == other.described)
        both = self.settings.keys() & other.settings.keys()
        if any(self.settings[name] != other.settings[name] for name in both):
            return False
        return True if self.identity is not None and self.identity == other.identity else None


@dataclass(frozen=True)
class MeasuredRun:
    """`curves` and `finals` are by measure; `clock` has the seconds of training that had passed at each step;
    `speed` is the median over the run, in sequences a second. `config` has the default of what it does not set."""

    path: Path
    name: str
    config: dict[str, Any]
    step: int
    finished: bool
    curves: dict[str, Points]
    finals: dict[str, float]
    held_out: HeldOut
    clock: Points = field(default_factory=list)
    speed: float | None = None

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
        return _from_record(path)
    if not path.is_dir():
        raise missing_folder(path, remedy=REMEDY)
    folder = RunFolder(path)
    for needed in (folder.config, folder.metrics):
        if not needed.exists():
            raise UserError(f"{path} is no run: it has no {needed.name}; {REMEDY}")
    records = read_records(folder.metrics)
    if not records:
        raise UserError(f"{path} has no records yet; wait until its run has logged its first steps")
    return _from_folder(folder, _with_defaults(read_yaml(folder.config)), records)


def _from_folder(folder: RunFolder, config: dict[str, Any], records: list[dict[str, Any]]) -> MeasuredRun:
    train, held_out = ([r for r in records if r.get("split") == split] for split in ("train", "validation"))
    fields = {LOSS: ("loss", 1.0), ACCURACY: ("accuracy", 100.0), SCORE: ("score", 1.0)}
    tasks = [name for r in held_out if "score" in r for name in r if name not in ("step", "split", "score")]
    fields |= {name: (name, 1.0) for name in dict.fromkeys(tasks)}
    curves = {title: _curve(held_out, name, factor) for title, (name, factor) in fields.items()}
    curves = {
        title: points for title, points in {**curves, TRAINING_LOSS: _curve(train, "loss")}.items() if points
    }
    speeds = [value for _, value in _curve(train, "seq_per_s")]
    seconds = _curve(train, "seconds")
    passed = itertools.accumulate(value for _, value in seconds)
    return MeasuredRun(
        folder.path, folder.path.resolve().name, config, max(record["step"] for record in records),
        folder.final.is_dir(), curves, {title: points[-1][1] for title, points in curves.items()},
        _held_out_of_folder(config), [(step, after) for (step, _), after in zip(seconds, passed, strict=True)],
        statistics.median(speeds) if speeds else None,
    )  # fmt: skip


def _held_out_of_folder(config: Mapping[str, Any]) -> HeldOut:
    settings = {"kind": "finetune"} if "tasks" in config else _pretraining(config)
    batches = config.get("batches")
    if not isinstance(batches, Mapping) or not batches:
        return HeldOut(settings=settings)
    described = {part: batches.get(part) for part in ("validation", "tasks")}
    validation = batches.get("validation")
    unseen = validation.get("data") if isinstance(validation, Mapping) else None
    hashes = [one for one in (batches.get("data"), unseen, batches.get("tokenizer")) if isinstance(one, str)]
    identity = identify_text(*hashes) if len(hashes) == 3 else None
    return HeldOut({**described, "eval_limit": config.get("eval_limit")}, identity, settings)


def _pretraining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "pretrain", **{name: config[name] for name in MEASURED_ON if name in config}}


def _from_record(path: Path) -> MeasuredRun:
    record = read_record(path)
    if record["kind"] == "speed" or "diverged" in record:
        raise UserError(f"{path} has no measures of a run ({record['title']}); {REMEDY}")
    curves: dict[str, Points] = {}
    if record["kind"] == "pretrain":
        held_out = record["curves"].get("held_out", [])
        curves = {
            LOSS: [(step, loss) for step, loss, _ in held_out],
            ACCURACY: [(step, accuracy) for step, _, accuracy in held_out],
            TRAINING_LOSS: [(step, loss) for step, loss in record["curves"].get("train", [])],
        }
    named = {"loss": LOSS, "accuracy": ACCURACY}
    finals = {named.get(n, METRICS[n].title): float(v) for n, v in record["measures"].items() if n in GAINS}
    seconds = record["measures"].get("train_seconds")
    config = _with_defaults(record["config"]) if "config" in record else {}  # fine-tuning keeps none
    settings = _pretraining(config) if config else {"kind": "finetune", "column": record["column"]}
    return MeasuredRun(
        path, record["title"], {"hardware": record["hardware"], **config}, record["step"], True, curves, finals,
        HeldOut(None, record.get("data"), settings), [(record["step"], float(seconds))] if seconds else [],
    )  # fmt: skip


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    return {**default_settings(FinetuneConfig if "tasks" in config else PretrainConfig), **config}


def _curve(records: list[dict[str, Any]], name: str, factor: float = 1.0) -> Points:
    return [(r["step"], factor * r[name]) for r in records if _is_number(r.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def distinct_names(names: Sequence[str]) -> list[str]:
    """A short name for each: itself, or where that is long the words that not all have; numbers tell equal ones
    apart."""
    if max(map(len, names)) > LONGEST_NAME:
        words = [name.split() for name in names]
        common = set(words[0]).intersection(*words[1:])
        own = [" ".join(w for w in some if w not in common) for some in words]
        names = [short or name for short, name in zip(own, names, strict=True)]
    short = [shorten(name, LONGEST_NAME) for name in names]
    if len(set(short)) == len(short):
        return short
    return [shorten(f"{number} {name}", LONGEST_NAME) for number, name in enumerate(short, start=1)]


def free_settings() -> frozenset[str]:
    """Those that decide nothing but how a run is run and watched; `eval_limit` and `data` say what is measured."""
    from altup.finetuning.config import FinetuneConfig
    from altup.training.pretraining import PretrainConfig

    return (PretrainConfig.may_change() | FinetuneConfig.may_change()) - {"eval_limit", "data"}


@dataclass(frozen=True)
class RunComparison:
    """Of two runs or more; differences are to the first."""

    runs: Sequence[MeasuredRun]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> RunComparison:
        if len(paths) < 2:
            raise UserError("one run has nothing to be compared with; give two or more")
        if len(paths) > MOST_RUNS:
            raise UserError(f"{len(paths)} runs are more than a chart can name; give at most {MOST_RUNS}")
        for one, other in itertools.combinations(paths, 2):
            if one.resolve() == other.resolve():
                raise UserError(f"{other} is given twice; name each run once")
        return cls([read_run(path) for path in paths])

    @cached_property
    def names(self) -> list[str]:
        return distinct_names([run.name for run in self.runs])

    @property
    def measures(self) -> list[str]:
        """What any of the runs measured on held-out examples, the usual ones first; else the training loss."""
        found = dict.fromkeys(name for run in self.runs for name in run.finals if name != TRAINING_LOSS)
        usual = [name for name in (LOSS, ACCURACY, SCORE) if name in found]
        return [*usual, *(name for name in found if name not in usual)] or [TRAINING_LOSS]

    @property
    def figures(self) -> Table:
        """What each run measured at its last evaluation."""
        columns = ["run", "step", *self.measures, "seq/s", "time"]
        rows = [
            [name, self._progress(run), *(self._figure(run, measure) for measure in self.measures), *_pace(run)]
            for name, run in zip(self.names, self.runs, strict=True)
        ]
        return Table(
            [Column(name, text=name == "run") for name in columns],
            [[Cell(cell) for cell in row] for row in rows],
            f"At each run's last evaluation; in brackets the difference to {self.names[0]}, where the held-out "
            "examples are known to be the same. Speed is the median of sequences a second as each run was "
            "trained, "
            "on whatever machine and beside whatever else.",
        )

    def _progress(self, run: MeasuredRun) -> str:
        steps = run.config.get("steps")
        stopped = not run.finished and isinstance(steps, int) and run.step < steps
        return f"{run.step:,} of {steps:,}" if stopped else f"{run.step:,}"

    def _figure(self, run: MeasuredRun, measure: str) -> str:
        value, first = run.finals.get(measure), self.runs[0].finals.get(measure)
        if value is None:
            return UNSET
        digits = DIGITS.get(measure, 2)
        compares = run is not self.runs[0] and run.held_out.same_as(self.runs[0].held_out)
        gain = f" ({signed(value - first, digits)})" if compares and first is not None else ""
        return f"{value:.{digits}f}{gain}"

    @cached_property
    def config_differences(self) -> dict[str, list[str]]:
        """Setting → its value in each run, for those that differ and decide what is computed."""
        free = free_settings()
        return {name: values for name, values in self._differing.items() if _top(name) not in free}

    def describe_free_differences(self) -> str:
        """One line on settings that differ and decide nothing; empty if there are none."""
        free = free_settings()
        found = list(dict.fromkeys(_top(name) for name in self._differing if _top(name) in free))
        return f"Also different, but without effect beyond rounding: {', '.join(found)}." if found else ""

    @cached_property
    def _differing(self) -> dict[str, list[str]]:
        """What a run does not say is not known to differ."""
        leaves = [dict(_leaves(run.config)) for run in self.runs]
        optional = {*OPTIONAL, *free_settings()}
        found = {}
        for name in dict.fromkeys(name for one in leaves for name in one):
            values = [one.get(name, UNSET) for one in leaves]
            known = [_top(name) not in optional or _top(name) in run.config for run in self.runs]
            if len(set(itertools.compress(values, known))) > 1:
                found[name] = values
        return found

    def remarks(self) -> list[str]:
        """What a reader should know before comparing the measures."""
        found = []
        same = [run.held_out.same_as(self.runs[0].held_out) for run in self.runs[1:]]
        if False in same:
            found.append("The held-out examples or the objective differ: losses and accuracies do not compare.")
        if None in same:
            unknown = [name for name, one in zip(self.names[1:], same, strict=True) if one is None]
            found.append(
                f"It is not known whether the held-out examples of {', '.join(unknown)} are those of "
                f"{self.names[0]}; if they are not, losses and accuracies do not compare."
            )
        if len({run.step for run in self.runs}) > 1:
            found.append("The runs have different numbers of steps; the curves compare them at the same step.")
        return found + [self._describe_seeds(group) for group in self._groups_of_seeds()]

    def _groups_of_seeds(self) -> list[list[int]]:
        """The runs that differ in nothing but the seed."""
        groups: dict[str, list[int]] = {}
        ignored = {"seed", "data", *free_settings()}
        for number, run in enumerate(self.runs):
            kept = sorted((name, value) for name, value in _leaves(run.config) if _top(name) not in ignored)
            groups.setdefault(str((kept, run.held_out.identity)), []).append(number)
        seeds = [run.config.get("seed", 0) for run in self.runs]
        return [group for group in groups.values() if len({seeds[n] for n in group}) == len(group) > 1]

    def _describe_seeds(self, group: list[int]) -> str:
        names, measure = ", ".join(self.names[number] for number in group), self.measures[0]
        found = [value for n in group if (value := self.runs[n].finals.get(measure)) is not None]
        if len(found) < 2:
            return f"{names} differ in the seed alone."
        return (
            f"{names} differ in the seed alone, and lie {max(found) - min(found):.{DIGITS.get(measure, 2)}f} "
            f"apart in "
            f"{measure}: a smaller difference between other runs may be chance."
        )

    def sparks(self) -> dict[str, str]:
        """Name → the curve of its first measure, drawn with letters on one scale for all runs."""
        curves = {n: run.curves.get(self.measures[0]) or [] for n, run in zip(self.names, self.runs, strict=True)}
        values = [value for points in curves.values() for _, value in points]
        most = max((points[-1][0] for points in curves.values() if points), default=1.0)
        return {name: _spark(points, most, min(values), max(values)) for name, points in curves.items() if points}

    def write(self, path: Path) -> None:
        """The page; a file that is none of ours is not overwritten."""
        if path.is_dir():
            raise UserError(f"{path} is a folder; give a file for the page (--out compare.html)")
        refuse_foreign(path, [title_mark(TITLE)], "a comparison")
        differences = Table(
            [Column("setting", text=True), *(Column(name, text=True) for name in self.names)],
            [[Cell(name), *map(Cell, values)] for name, values in self.config_differences.items()],
            f"Settings that differ; {UNSET} where a config does not have one.",
        )
        page = render(
            "compare.html", title=TITLE, runs=list(zip(self.names, self.runs, strict=True)),
            remarks=self.remarks(), figures=self.figures, curves=self.charts(),
            free_differences=self.describe_free_differences(), differences=differences,
        )  # fmt: skip
        atomic_write(path, page)

    def charts(self) -> list[Figure]:
        """Every curve that two runs or more have, over the steps; the first one also over seconds of training."""
        found: list[Figure] = []
        for measure in dict.fromkeys([*self.measures, TRAINING_LOSS]):
            series = self._series(run.curves.get(measure, []) for run in self.runs)
            if sum(bool(s.points) for s in series) > 1:
                form = f"{{:.{DIGITS.get(measure, 2)}f}}".format
                picture = line_chart(series, x_label="step", y_label=measure, y_format=form)
                found.append(Figure(measure, picture, f"{'Lower' if 'loss' in measure else 'Higher'} is better."))
        timed = self._series(run.in_time(self.measures[0]) for run in self.runs)
        if sum(len(s.points) > 1 for s in timed) > 1:
            picture = line_chart(timed, x_label="seconds of training", y_label=self.measures[0])
            about = "Seconds that each run spent in training steps, without evaluations and saves."
            found.append(Figure(f"{self.measures[0]} against time", picture, about))
        return found

    def _series(self, curves: Iterable[Points]) -> list[Series]:
        named = enumerate(zip(self.names, curves, strict=True))
        return [Series(name, points, number % PALETTE) for number, (name, points) in named]


def _top(name: str) -> str:
    """The setting that `model_overrides.d_ff` is of."""
    return name.partition(".")[0]


def _pace(run: MeasuredRun) -> list[str]:
    speed = UNSET if run.speed is None else f"{run.speed:,.0f}" if run.speed >= 10 else f"{run.speed:.1f}"
    return [speed, UNSET if run.seconds is None else duration(run.seconds)]


def _leaves(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """The values of a nested config by their paths, as text. Of `batches` only what no other setting says."""
    for key, value in config.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        elif not name.startswith("batches.") or key in OF_BATCHES:
            text = str(value)
            shown = f"{text[:12]}…" if HASH.fullmatch(text) else shorten(text, LONG)
            yield name, UNSET if value is None else shown


def _spark(points: Points, most: float, low: float, high: float) -> str:
    """A curve as letters of eight heights: in each position the last value before its end."""
    drawn = ""
    for position in range(1, SPARK + 1):
        before = [value for step, value in points if step <= position * most / SPARK]
        height = (before[-1] - low) / (high - low) if before and high > low else 0.0
        ended = points[-1][0] <= (position - 1) * most / SPARK
        drawn += BLOCKS[round(height * (len(BLOCKS) - 1))] if before and not ended else " "
    return drawn.rstrip()
