"""The frontier of the dense models, and the speedup at equal accuracy, as the paper defines it.

The dense models are points (latency, score); between neighbours in latency the score is taken to be linear. The
dense model that would reach a score is the fastest point on that line with it, and

    speedup = (latency of that dense model − latency of the model) / latency of the model.

A score outside the dense models' range has no such point: nothing is extrapolated. A loss is a score with the
other sign. The speedup's standard error is that of the three scores it is made of, over their seeds: s of the
model, s₀ and s₁ of the dense models to both sides, whose latencies are t₀ and t₁. With the position
x = (s − s₀) / (s₁ − s₀) between them, the latency's error is

    (t₁ − t₀) / (s₁ − s₀) · √(e² + (1 − x)² e₀² + x² e₁²).

Latencies count as exact: they are medians over rounds in turns.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from altup.core.errors import UserError
from altup.studies.scale import read_variant
from altup.studies.statistics import Difference, Mean, Statistics, combine
from altup.studies.study import FINETUNED, METRICS, Study

OUTSIDE = "outside the dense range"
NO_LINE = "needs two dense models"
NOT_RUN = "not run at this scale"
# What the paper's figure calls a benchmark, and our measures for it (their mean).
SCORES = {
    "accuracy": ("accuracy",),
    **{column.title: tuple(column.measures) for column in FINETUNED.values()},
    "loss": ("loss",),
}
# Relative speed → what is timed, the measure of the baseline's absolute speed.
LATENCIES = {
    "relative_speed": ("training", "train_seq_per_s"),
    "relative_forward": ("forward", "forward_ms"),
    "relative_generate": ("generation", "generate_ms"),
}


class OutsideDenseRangeError(UserError):
    """No dense model that was measured brackets the score."""


def dense_latency(dense: Sequence[tuple[float, float]], score: float) -> float:
    """The latency at which the line through the dense points (latency, score) first has `score`."""
    return _find_on_line(dense, score)[0]


def _find_on_line(dense: Sequence[tuple[float, float]], score: float) -> tuple[float, int, int]:
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
    """`speedup` in percent, with its standard error and Student's interval.

    There is no error where one of the three models has a single seed, or the line between the two dense ones is
    level or upright."""
    points = [(time, mean.mean) for time, mean in dense]
    found = 100 * speedup(points, latency, score.mean)
    _, i, j = _find_on_line(points, score.mean)
    (fast, below), (slow, above) = dense[i], dense[j]
    low, high = below.mean, above.mean
    seeds = score.seeds, min(below.seeds, above.seeds)
    if low == high or fast == slow:
        return Difference(found, seeds)
    x, a_point = (score.mean - low) / (high - low), 100 * abs((slow - fast) / (high - low)) / latency
    weights = ((1.0, score), (1 - x, below), (x, above))
    errors = [(None if m.error is None else a_point * w * m.error, m.seeds) for w, m in weights]
    return combine(found, seeds, errors)


@dataclass(frozen=True)
class SpeedupRow:
    """Speedup at equal score in percent, by the latency; text where there is none."""

    size: str
    label: str
    benchmark: str
    paper: float | None
    ours: dict[str, Difference | str]


def compare_speedups(study: Study, stats: Statistics) -> list[SpeedupRow]:
    """A row for every row of the paper, and for every model and score of ours that was run."""
    of_paper = {
        (str(row["model"]), str(study.label_of(row)), str(row["benchmark"])): float(row["speedup_percent"])
        for row in study.paper_rows()
    }
    ours = [
        (size, row.label, benchmark)
        for row in study.rows if row.label not in study.frontier
        for size in stats.sizes(study.name, row.label) for benchmark in SCORES
    ]  # fmt: skip
    rows = []
    for place in dict.fromkeys([*of_paper, *ours]):
        found = {metric: _speedup(study, stats, *place, metric) for metric in LATENCIES}
        if place in of_paper or any(value != NOT_RUN for value in found.values()):
            rows.append(SpeedupRow(*place, of_paper.get(place), found))
    return rows


def frontier_points(
    study: Study, stats: Statistics, benchmark: str, metric: str
) -> list[tuple[str, str, float, Mean]]:
    """(size, label, latency, score) of every model that has both."""
    found = []
    for row in study.rows:
        for size in stats.sizes(study.name, row.label):
            score = _score(study, stats, size, row.label, benchmark)
            time = _latency(study, stats, size, row.label, metric)
            differs = stats.reason_against(study, size, SCORES[benchmark][0], row.label, study.baseline)
            if score is not None and time is not None and not differs:
                found.append((size, row.label, time, score))
    return found


def _speedup(
    study: Study, stats: Statistics, size: str, label: str, benchmark: str, metric: str
) -> Difference | str:
    length = read_variant(size)[1]  # models are compared with dense ones that trained as long
    points = [p for p in frontier_points(study, stats, benchmark, metric) if read_variant(p[0])[1] == length]
    own = [(time, score) for s, l, time, score in points if (s, l) == (size, label)]
    dense = [(time, score) for _, l, time, score in points if l in study.frontier]
    if not own:
        return NOT_RUN
    if len(dense) < 2:
        return NO_LINE
    try:
        return speedup_percent(dense, *own[0])
    except OutsideDenseRangeError:
        return OUTSIDE


def _score(study: Study, stats: Statistics, size: str, label: str, benchmark: str) -> Mean | None:
    """The mean over the benchmark's measures, of which a loss counts as its negative: more is better. The error of
    a mean of two measures is at most the mean of theirs."""
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


def _latency(study: Study, stats: Statistics, size: str, label: str, metric: str) -> float | None:
    """Seconds a sequence in training, milliseconds a batch in inference.

    It is the baseline's, by the ratio of their speeds: only ratios are measured in turns, and a machine is not as
    fast in every comparison.
    """
    ratio = stats.relative(study, size, metric, label)
    absolute = stats.mean(study.name, study.baseline, size, LATENCIES[metric][1])
    if ratio is None or absolute is None:
        return None
    return (1 / absolute.mean if metric == "relative_speed" else absolute.mean) / ratio
