"""The frontier of the dense models, and the speedup at equal accuracy, as the paper defines it.

The dense models are points (latency, score); between neighbours in latency the score is taken to be linear. The
dense model that would reach a score is the fastest place on that line with it, and

    speedup = (latency of that dense model − latency of the model) / latency of the model.

A score outside the dense models' range has no such place: nothing is extrapolated. The speedup's standard error
is that of the three scores it is made of, over their seeds: s of the model, s₀ and s₁ of the dense models to both
sides, whose latencies are t₀ and t₁. With the place x = (s − s₀) / (s₁ − s₀) between them, the latency's error is

    (t₁ − t₀) / (s₁ − s₀) · √(e² + (1 − x)² e₀² + x² e₁²).

Latencies count as exact: they are medians over rounds in turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from altup.core.errors import UserError
from altup.studies import paper
from altup.studies.comparison import NOT_RUN, size_of
from altup.studies.statistics import Statistics
from altup.studies.study import FINETUNED, Study

OUTSIDE = "outside the dense range"
NO_LINE = "needs two dense models"
# What the paper's figure calls a benchmark, and our measures for it (their mean).
BENCHMARKS = {
    "accuracy": ("accuracy",),
    **{column.title: tuple(column.measures) for column in FINETUNED.values()},
}
LATENCIES = {"training": "relative_speed", "forward": "relative_forward", "generation": "relative_generate"}


class OutsideDenseRangeError(UserError):
    """No dense model that was measured brackets the score."""


def dense_latency(dense: Sequence[tuple[float, float]], score: float) -> float:
    """The latency at which the line through the dense points (latency, score) first has `score`."""
    return _place(dense, score)[0]


def _place(
    dense: Sequence[tuple[float, float]], score: float
) -> tuple[float, tuple[float, float], tuple[float, float]]:
    """The latency, and the dense points to both sides of it."""
    points = sorted(dense)
    if not points:
        raise OutsideDenseRangeError("no dense model was measured; run the frontier's dense rows")
    if any(not latency > 0 for latency, _ in points):
        raise UserError(f"latencies must be above 0: {[latency for latency, _ in points]}")
    if points[0][1] == score:
        return points[0][0], points[0], points[min(1, len(points) - 1)]
    if score > points[0][1]:  # a lower one would be reached by a faster model than any measured
        for (fast, low), (slow, high) in itertools.pairwise(points):
            if low <= score <= high:
                latency = slow if high == low else fast + (slow - fast) * (score - low) / (high - low)
                return latency, (fast, low), (slow, high)
    low, high = min(s for _, s in points), max(s for _, s in points)
    raise OutsideDenseRangeError(
        f"score {score:.2f} is outside the dense range ({points[0][1]:.2f} for the fastest, {low:.2f} to "
        f"{high:.2f} in all); measure a dense model beyond it: nothing is extrapolated"
    )


def speedup(dense: Sequence[tuple[float, float]], latency: float, score: float) -> float:
    """Relative speedup of a model with `latency` and `score`; 0.27 means 27 % faster than dense."""
    if not latency > 0:
        raise UserError(f"latency={latency} must be above 0")
    return (dense_latency(dense, score) - latency) / latency


def speedup_error(
    dense: Sequence[tuple[float, float]],
    latency: float,
    score: float,
    errors: Mapping[float, float | None],
    error: float | None,
) -> float | None:
    """Standard error of `speedup`; `errors` are those of the dense scores by latency, `error` that of `score`.

    None where one of the three models has a single seed, or the dense scores to both sides are the same.
    """
    _, (fast, low), (slow, high) = _place(dense, score)
    below, above = errors[fast], errors[slow]
    if error is None or below is None or above is None or low == high:
        return None
    x = (score - low) / (high - low)
    of_score = math.hypot(error, (1 - x) * below, x * above)
    return abs((slow - fast) / (high - low)) * of_score / latency


@dataclass(frozen=True)
class SpeedupRow:
    """Speedup at equal score in percent, by what is timed, and its standard error; text where there is none."""

    size: str
    label: str
    benchmark: str
    paper: float | None
    ours: dict[str, float | str]
    errors: dict[str, float | None] = field(default_factory=dict)


def compare_speedups(study: Study, stats: Statistics) -> list[SpeedupRow]:
    """A row for every row of the paper, and for every model and score of ours that can be placed."""
    rows = []
    told = {
        (size_of(row, study), study.label_of(row), str(row["benchmark"])): float(row["speedup_percent"])
        for row in study.paper_rows()
    }
    for (size, label, benchmark), percent in told.items():
        ours = _speedups(study, stats, size, label, benchmark)
        rows.append(SpeedupRow(size, label or "", benchmark, percent, *ours))
    for row in study.rows:
        if row.label in study.frontier:
            continue
        for size in stats.sizes(study.name, row.label):
            for benchmark in BENCHMARKS:
                if (size, row.label, benchmark) not in told:
                    ours = _speedups(study, stats, size, row.label, benchmark)
                    if any(value != NOT_RUN for value in ours[0].values()):
                        rows.append(SpeedupRow(size, row.label, benchmark, None, *ours))
    return rows


def frontier_points(
    study: Study, stats: Statistics, benchmark: str, latency: str
) -> list[tuple[str, str, float, float]]:
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
) -> tuple[dict[str, float | str], dict[str, float | None]]:
    found: dict[str, float | str] = {}
    errors: dict[str, float | None] = {}
    for name, metric in LATENCIES.items():
        points = frontier_points(study, stats, benchmark, metric)
        own = [(time, score) for s, l, time, score in points if (s, l) == (size, label)]
        dense = [(time, score) for _, l, time, score in points if l in study.frontier]
        if not own:
            found[name] = NOT_RUN
            continue
        if len(dense) < 2:
            found[name] = NO_LINE
            continue
        try:
            found[name] = 100 * speedup(dense, *own[0])
            by_latency = {
                time: _score_error(study, stats, s, l, benchmark)
                for s, l, time, _ in points
                if l in study.frontier
            }
            error = speedup_error(
                dense, *own[0], by_latency, _score_error(study, stats, size, str(label), benchmark)
            )
            errors[name] = None if error is None else 100 * error
        except OutsideDenseRangeError:
            found[name] = OUTSIDE
    return found, errors


def _score(study: Study, stats: Statistics, size: str, label: str, benchmark: str) -> float | None:
    parts = [stats.mean(study.name, label, size, metric) for metric in BENCHMARKS[benchmark]]
    values = [part.mean for part in parts if part is not None]
    return sum(values) / len(values) if len(values) == len(parts) else None


def _score_error(study: Study, stats: Statistics, size: str, label: str, benchmark: str) -> float | None:
    """The standard error of `_score`; None with one seed. Of a mean of two measures, it is at most this."""
    parts = [stats.mean(study.name, label, size, metric) for metric in BENCHMARKS[benchmark]]
    errors = [part.error for part in parts if part is not None and part.error is not None]
    return sum(errors) / len(errors) if errors and len(errors) == len(parts) else None


def _time(study: Study, stats: Statistics, size: str, label: str, metric: str) -> float | None:
    """Latency of a model: seconds a sequence in training, milliseconds a batch in inference.

    It is the baseline's, by the ratio of their speeds: only ratios are measured in turns, and a machine is not as
    fast in every comparison.
    """
    absolute = {
        "relative_speed": "train_seq_per_s",
        "relative_forward": "forward_ms",
        "relative_generate": "generate_ms",
    }
    found = stats.mean(study.name, study.baseline, size, absolute[metric])
    base, own = (stats.mean(study.name, name, size, metric) for name in (study.baseline, label))
    if found is None or base is None or own is None:
        return None
    latency = 1 / found.mean if metric == "relative_speed" else found.mean
    return latency * base.mean / own.mean


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
