"""The frontier of the dense models, and the speedup at equal accuracy, as the paper defines it.

The dense models are points (latency, score); between neighbours in latency the score is taken to be linear. The
dense model that would reach a score is the fastest place on that line with it, and

    speedup = (latency of that dense model − latency of the model) / latency of the model.

A score outside the dense models' range has no such place: nothing is extrapolated. A loss is a score with the
other sign. The speedup's standard error is that of the three scores it is made of, over their seeds: s of the
model, s₀ and s₁ of the dense models to both sides, whose latencies are t₀ and t₁. With the place
x = (s − s₀) / (s₁ − s₀) between them, the latency's error is

    (t₁ − t₀) / (s₁ − s₀) · √(e² + (1 − x)² e₀² + x² e₁²).

Latencies count as exact: they are medians over rounds in turns.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from altup.core.errors import UserError
from altup.studies import paper
from altup.studies.comparison import NOT_RUN, size_of
from altup.studies.scale import read_variant
from altup.studies.statistics import Difference, Mean, Statistics, with_interval
from altup.studies.study import FINETUNED, METRICS, Study

OUTSIDE = "outside the dense range"
NO_LINE = "needs two dense models"
# What the paper's figure calls a benchmark, and our measures for it (their mean).
BENCHMARKS = {
    "accuracy": ("accuracy",),
    **{column.title: tuple(column.measures) for column in FINETUNED.values()},
}
SCORES = {**BENCHMARKS, "loss": ("loss",)}
LATENCIES = {"training": "relative_speed", "forward": "relative_forward", "generation": "relative_generate"}


class OutsideDenseRangeError(UserError):
    """No dense model that was measured brackets the score."""


def dense_latency(dense: Sequence[tuple[float, float]], score: float) -> float:
    """The latency at which the line through the dense points (latency, score) first has `score`."""
    return _place(dense, score)[0]


def _place(dense: Sequence[tuple[float, float]], score: float) -> tuple[float, int, int]:
    """The latency, and which of the dense points stand to both sides of it."""
    if not dense:
        raise OutsideDenseRangeError("no dense model was measured; run the frontier's dense rows")
    if any(not latency > 0 for latency, _ in dense):
        raise UserError(f"latencies must be above 0: {[latency for latency, _ in dense]}")
    order = sorted(range(len(dense)), key=lambda i: dense[i])
    first, scores = dense[order[0]][1], [score for _, score in dense]
    if first == score:
        return dense[order[0]][0], order[0], order[min(1, len(order) - 1)]
    if score > first:  # a lower one would be reached by a faster model than any measured
        for i, j in itertools.pairwise(order):
            (fast, low), (slow, high) = dense[i], dense[j]
            if low <= score <= high:
                return slow if high == low else fast + (slow - fast) * (score - low) / (high - low), i, j
    raise OutsideDenseRangeError(
        f"score {score:.2f} is outside the dense range ({first:.2f} for the fastest, {min(scores):.2f} to "
        f"{max(scores):.2f} in all); measure a dense model beyond it: nothing is extrapolated"
    )


def speedup(dense: Sequence[tuple[float, float]], latency: float, score: float) -> float:
    """Relative speedup of a model with `latency` and `score`; 0.27 means 27 % faster than dense."""
    if not latency > 0:
        raise UserError(f"latency={latency} must be above 0")
    return (dense_latency(dense, score) - latency) / latency


def speedup_percent(dense: Sequence[tuple[float, Mean]], latency: float, score: Mean) -> Difference:
    """`speedup` in percent, with its standard error and Student's interval, whose degrees of freedom are Welch's.

    There is no error where one of the three models has a single seed, or the line between the two dense ones is
    level or upright."""
    points = [(time, mean.mean) for time, mean in dense]
    found = 100 * speedup(points, latency, score.mean)
    _, i, j = _place(points, score.mean)
    (fast, below), (slow, above) = dense[i], dense[j]
    low, high = below.mean, above.mean
    seeds = score.seeds, min(below.seeds, above.seeds)
    if score.error is None or below.error is None or above.error is None or low == high or fast == slow:
        return Difference(found, seeds)
    x, a_point = (score.mean - low) / (high - low), 100 * abs((slow - fast) / (high - low)) / latency
    errors = [a_point * score.error, a_point * (1 - x) * below.error, a_point * x * above.error]
    error = math.hypot(*errors)
    if error == 0:
        return Difference(found, seeds, 0.0, found, found)
    counts = (score.seeds, below.seeds, above.seeds)
    freedom = 1 / sum((e / error) ** 4 / (n - 1) for e, n in zip(errors, counts, strict=True))
    return with_interval(found, seeds, error, freedom)


@dataclass(frozen=True)
class SpeedupRow:
    """Speedup at equal score in percent, by what is timed; text where there is none."""

    size: str
    label: str
    benchmark: str
    paper: float | None
    ours: dict[str, Difference | str]


def compare_speedups(study: Study, stats: Statistics) -> list[SpeedupRow]:
    """A row for every row of the paper, and for every model and score of ours that can be placed."""
    rows = []
    told = {
        (size_of(row, study), study.label_of(row), str(row["benchmark"])): float(row["speedup_percent"])
        for row in study.paper_rows()
    }
    for (size, label, benchmark), percent in told.items():
        ours = _speedups(study, stats, size, label, benchmark)
        rows.append(SpeedupRow(size, label or "", benchmark, percent, ours))
    for row in study.rows:
        if row.label in study.frontier:
            continue
        for size in stats.sizes(study.name, row.label):
            for benchmark in SCORES:
                if (size, row.label, benchmark) not in told:
                    ours = _speedups(study, stats, size, row.label, benchmark)
                    if any(value != NOT_RUN for value in ours.values()):
                        rows.append(SpeedupRow(size, row.label, benchmark, None, ours))
    return rows


def frontier_points(
    study: Study, stats: Statistics, benchmark: str, latency: str
) -> list[tuple[str, str, float, Mean]]:
    """(size, label, relative latency, score) of every model that has both."""
    found = []
    for row in study.rows:
        for size in stats.sizes(study.name, row.label):
            score, time = (
                _score(study, stats, size, row.label, benchmark),
                _time(study, stats, size, row.label, latency),
            )
            if score is not None and time is not None:
                found.append((size, row.label, time, score))
    return found


def _speedups(
    study: Study, stats: Statistics, size: str, label: str | None, benchmark: str
) -> dict[str, Difference | str]:
    found: dict[str, Difference | str] = {}
    for name, metric in LATENCIES.items():
        points = frontier_points(study, stats, benchmark, metric)
        own = [(time, score) for s, l, time, score in points if (s, l) == (size, label)]
        alike = on_one_line(study, stats, size, metric)
        dense = [(time, score) for s, l, time, score in points if l in study.frontier and alike(s)]
        if not own:
            found[name] = NOT_RUN
        elif len(dense) < 2:
            found[name] = NO_LINE
        else:
            try:
                found[name] = speedup_percent(dense, *own[0])
            except OutsideDenseRangeError:
                found[name] = OUTSIDE
    return found


def on_one_line(study: Study, stats: Statistics, size: str, metric: str) -> Callable[[str], bool]:
    """Whether the models of another size stand on one line with those of this: they trained for as long, and their
    latencies have one unit, which those of speeds that a study gives have within one size."""
    if is_given(study, stats, size, metric):
        return lambda other: other == size
    return lambda other: read_variant(other)[1] == read_variant(size)[1]


def _score(study: Study, stats: Statistics, size: str, label: str, benchmark: str) -> Mean | None:
    """The mean over the benchmark's measures, of which a loss counts as its negative: more is better. The error of
    a mean of two measures is at most what is told."""
    parts = {metric: stats.mean(study.name, label, size, metric) for metric in SCORES[benchmark]}
    found = [(part, 1 if METRICS[metric].higher else -1) for metric, part in parts.items() if part is not None]
    if len(found) < len(parts):
        return None
    errors = [part.error for part, _ in found if part.error is not None]
    return Mean(
        statistics.fmean(sign * part.mean for part, sign in found),
        min(part.seeds for part, _ in found),
        statistics.fmean(errors) if len(errors) == len(found) else None,
        found[0][0].hardware,
    )


def _time(study: Study, stats: Statistics, size: str, label: str, metric: str) -> float | None:
    """Latency of a model: seconds a sequence in training, milliseconds a batch in inference; where a study gives
    its speeds, in units of the baseline's.

    It is the baseline's, by the ratio of their speeds: only ratios are measured in turns, and a machine is not as
    fast in every comparison.
    """
    base, own = (stats.mean(study.name, name, size, metric) for name in (study.baseline, label))
    if base is None or own is None:
        return None
    if is_given(study, stats, size, metric):
        return base.mean / own.mean
    absolute = {
        "relative_speed": "train_seq_per_s",
        "relative_forward": "forward_ms",
        "relative_generate": "generate_ms",
    }
    found = stats.mean(study.name, study.baseline, size, absolute[metric])
    if found is None:
        return None
    latency = 1 / found.mean if metric == "relative_speed" else found.mean
    return latency * base.mean / own.mean


def is_given(study: Study, stats: Statistics, size: str, metric: str) -> bool:
    """Whether the relative speeds of a size are those that the study's file gives: then no time is known."""
    base = stats.mean(study.name, study.baseline, size, metric)
    return base is not None and not base.hardware


def printed_speedups() -> list[SpeedupRow]:
    """The same arithmetic on the numbers that the paper prints: small and base with AltUp between S, B and L."""
    speeds = {
        (row["model"], row["method"]): float(row["train_speed_examples_per_s_per_core"])
        for row in paper.table("parameters_and_speed")
        if row["pretrain_steps"] == 500_000
    }
    scores = {(row["model"], row["method"]): row for row in paper.table("varying_k") if row["k"] != 4}
    rows = []
    for size in ("small", "base"):
        for benchmark, metrics in BENCHMARKS.items():
            columns = ["pretrain_accuracy" if m == "accuracy" else m for m in metrics]

            def score(place: tuple[str, str], columns: list[str] = columns) -> float:
                return sum(float(scores[place][c]) for c in columns) / len(columns)

            dense = [(1 / speeds[s, "dense"], score((s, "dense"))) for s in ("small", "base", "large")]
            found = 100 * speedup(dense, 1 / speeds[size, "altup"], score((size, "altup")))
            rows.append(SpeedupRow(size, "AltUp K=2", benchmark, found, {}))
    return rows
