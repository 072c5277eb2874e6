"""Runs side by side, whatever they trained: figures, curves, speed, and what their configs have different."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write, refuse_foreign
from altup.core.schema import LONG
from altup.core.text import duration, shorten, signed
from altup.studies.charts import Series, line_chart
from altup.studies.measured_run import (
    ACCURACY,
    LOSS,
    SCORE,
    TRAINING_LOSS,
    MeasuredRun,
    Points,
    distinct_names,
    free_settings,
    read_run,
)
from altup.studies.pages import Cell, Column, DataTable, Figure, render, title_mark

TITLE = "altup compare: runs side by side"  # by which its page is known
MOST_RUNS = 14  # that a chart has room to name
PALETTE = 7
BLOCKS = "▁▂▃▄▅▆▇█"
SPARK = 16  # characters of a curve in the terminal
UNSET = "–"
DIGITS = {LOSS: 4, TRAINING_LOSS: 4}  # after the point; two otherwise
UNTOLD = ("hardware", "batches", "data")  # that not every folder or record tells
OF_BATCHES = ("data", "tokenizer", "sha256", "examples")  # what a config's `batches` alone says
HASH = re.compile(r"[0-9a-f]{40,64}")


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
        return distinct_names(self.runs)

    @property
    def measures(self) -> list[str]:
        """What any of the runs measured on held-out examples, the usual ones first; else the training loss."""
        found = dict.fromkeys(name for run in self.runs for name in run.finals if name != TRAINING_LOSS)
        usual = [name for name in (LOSS, ACCURACY, SCORE) if name in found]
        return [*usual, *(name for name in found if name not in usual)] or [TRAINING_LOSS]

    def rows(self) -> list[list[str]]:
        """A row a run, as people read it; `head` names the columns."""
        return [
            [name, self._progress(run), *(self._figure(run, measure) for measure in self.measures), *_pace(run)]
            for name, run in zip(self.names, self.runs, strict=True)
        ]

    @property
    def head(self) -> list[str]:
        return ["run", "step", *self.measures, "seq/s", "time"]

    def _progress(self, run: MeasuredRun) -> str:
        stopped = not run.finished and run.planned is not None and run.step < run.planned
        return f"{run.step:,} of {run.planned:,}" if stopped else f"{run.step:,}"

    def _figure(self, run: MeasuredRun, measure: str) -> str:
        value, first = run.finals.get(measure), self.runs[0].finals.get(measure)
        if value is None:
            return UNSET
        digits = DIGITS.get(measure, 2)
        compares = run is not self.runs[0] and run.held_out.same_as(self.runs[0].held_out)
        gain = f" ({signed(value - first, digits)})" if compares and first is not None else ""
        return f"{value:.{digits}f}{gain}"

    @property
    def config_differences(self) -> dict[str, list[str]]:
        """Setting → its value in each run, for those that differ and decide what is computed."""
        free = free_settings()
        return {name: values for name, values in self._differing().items() if _top(name) not in free}

    def tell_free_differences(self) -> str:
        """One line on settings that differ and decide nothing; empty if there are none."""
        free = free_settings()
        found = list(dict.fromkeys(_top(name) for name in self._differing() if _top(name) in free))
        if not found:
            return ""
        return f"Also different, but deciding nothing beyond rounding: {', '.join(found)}."

    def _differing(self) -> dict[str, list[str]]:
        """What a run does not tell is not known to differ."""
        leaves = [dict(_leaves(run.config)) for run in self.runs]
        untold = {*UNTOLD, *free_settings()}
        found = {}
        for name in dict.fromkeys(name for one in leaves for name in one):
            values = [one.get(name, UNSET) for one in leaves]
            told = [_top(name) not in untold or _top(name) in run.config for run in self.runs]
            if len(set(itertools.compress(values, told))) > 1:
                found[name] = values
        return found

    def remarks(self) -> list[str]:
        """What a reader should know before comparing the figures."""
        told = []
        same = [run.held_out.same_as(self.runs[0].held_out) for run in self.runs[1:]]
        if False in same:
            told.append("The held-out examples or the objective differ: losses and accuracies do not compare.")
        if None in same:
            unknown = [name for name, one in zip(self.names[1:], same, strict=True) if one is None]
            told.append(
                f"It is not known whether the held-out examples of {', '.join(unknown)} are those of "
                f"{self.names[0]}; if they are not, losses and accuracies do not compare."
            )
        steps = {run.step for run in self.runs}
        if len(steps) > 1:
            told.append("The runs have different numbers of steps; the curves compare them at the same step.")
        told += [self._tell_seeds(group) for group in self._differing_in_seed_alone()]
        return told

    def _differing_in_seed_alone(self) -> list[list[int]]:
        groups: dict[str, list[int]] = {}
        ignored = {"seed", "data", *free_settings()}
        for number, run in enumerate(self.runs):
            kept = {name: value for name, value in _leaves(run.config) if _top(name) not in ignored}
            place = [*sorted(kept.items()), run.held_out.identity]
            groups.setdefault(str(place), []).append(number)
        seeds = [run.config.get("seed", 0) for run in self.runs]
        return [group for group in groups.values() if len({seeds[n] for n in group}) == len(group) > 1]

    def _tell_seeds(self, group: list[int]) -> str:
        names = ", ".join(self.names[number] for number in group)
        measure = self.measures[0]
        found = [value for n in group if (value := self.runs[n].finals.get(measure)) is not None]
        if len(found) < 2:
            return f"{names} differ in the seed alone."
        spread = max(found) - min(found)
        return (
            f"{names} differ in the seed alone, and lie {spread:.{DIGITS.get(measure, 2)}f} apart in {measure}: "
            "a smaller difference between other runs may be chance."
        )

    def sparks(self) -> dict[str, str]:
        """Name → the curve of its first measure, drawn with letters on one scale for all runs."""
        curves = {
            name: run.curves.get(self.measures[0]) or [] for name, run in zip(self.names, self.runs, strict=True)
        }
        values = [value for points in curves.values() for _, value in points]
        most = max((points[-1][0] for points in curves.values() if points), default=1.0)
        return {name: _spark(points, most, min(values), max(values)) for name, points in curves.items() if points}

    def write(self, path: Path) -> None:
        """The page; a file that is none of ours is not written over."""
        if path.is_dir():
            raise UserError(f"{path} is a folder; give a file for the page (--out compare.html)")
        refuse_foreign(path, [title_mark(TITLE)], "a comparison")
        rows = [[Cell(cell) for cell in row] for row in self.rows()]
        changed = self.config_differences
        page = render(
            "compare.html",
            title=TITLE,
            runs=list(zip(self.names, self.runs, strict=True)),
            remarks=self.remarks(),
            figures=DataTable(
                [Column(name, text=name == "run") for name in self.head],
                rows,
                f"At each run's last evaluation; in brackets the difference to {self.names[0]}, where the "
                "held-out examples are known to be the same. Speed is the median of sequences a second as each "
                "run was trained, on whatever machine and beside whatever else.",
            ),
            curves=self.charts(),
            free_differences=self.tell_free_differences(),
            differences=DataTable(
                [Column("setting", text=True), *(Column(name, text=True) for name in self.names)],
                [[Cell(name), *map(Cell, values)] for name, values in changed.items()],
                f"Settings that differ; {UNSET} where a config does not have one.",
            )
            if changed
            else None,
        )
        atomic_write(path, page)

    def charts(self) -> list[Figure]:
        """Every curve that two runs or more have, over the steps; the first one also over seconds of training."""
        found: list[Figure] = []
        for measure in [*self.measures, TRAINING_LOSS]:
            series = self._series(run.curves.get(measure, []) for run in self.runs)
            if sum(bool(s.points) for s in series) > 1 and measure not in {figure.title for figure in found}:
                found.append(
                    Figure(
                        measure,
                        line_chart(
                            series,
                            x_label="step",
                            y_label=measure,
                            y_format=f"{{:.{DIGITS.get(measure, 2)}f}}".format,
                        ),
                        "Lower is better." if "loss" in measure else "Higher is better.",
                    )
                )
        timed = self._series(run.in_time(self.measures[0]) for run in self.runs)
        if sum(len(s.points) > 1 for s in timed) > 1:
            found.append(
                Figure(
                    f"{self.measures[0]} against time",
                    line_chart(timed, x_label="seconds of training", y_label=self.measures[0]),
                    "Seconds that each run spent in training steps, evaluations and saves left out.",
                )
            )
        return found

    def _series(self, curves: Iterator[Points]) -> list[Series]:
        return [
            Series(name, points, number % PALETTE)
            for number, (name, points) in enumerate(zip(self.names, curves, strict=True))
        ]


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
            told = str(value)
            yield (
                name,
                UNSET if value is None else f"{told[:12]}…" if HASH.fullmatch(told) else shorten(told, LONG),
            )


def _spark(points: Points, most: float, low: float, high: float) -> str:
    """A curve as letters of eight heights: in each place the last value before its end."""
    drawn = ""
    for place in range(1, SPARK + 1):
        before = [value for step, value in points if step <= place * most / SPARK]
        height = (before[-1] - low) / (high - low) if before and high > low else 0.0
        ended = points[-1][0] <= (place - 1) * most / SPARK
        drawn += BLOCKS[round(height * (len(BLOCKS) - 1))] if before and not ended else " "
    return drawn.rstrip()
