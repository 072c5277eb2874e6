"""The plots of a study: how its models learned, how fast they are, and accuracy against speed, time and FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from altup.core.text import number_of
from altup.studies.charts import Bar, Point, Runs, Series
from altup.studies.drawings import Bars, Dots, Lines, Plot, Scatter
from altup.studies.frontier import frontier_points, is_given, on_one_line
from altup.studies.results import Records
from altup.studies.scale import read_variant
from altup.studies.statistics import Statistics
from altup.studies.study import METRICS, Study

# Models that many studies share keep their colour through the report.
FIXED = {"Dense": 0, "AltUp K=2": 1, "Recycled K=2": 2, "AltUp K=4": 3}
PALETTE = 7
SPEEDS = {"relative_speed": "training", "relative_forward": "forward pass", "relative_generate": "generation"}


@dataclass(frozen=True)
class Cost:
    """What a run costs, along an axis: a measure times `unit`; of the row `of`, if not of the run's own."""

    measure: str
    label: str
    unit: float
    of: str | None = None

    def find(self, study: Study, stats: Statistics, label: str, size: str) -> float | None:
        mean = stats.mean(study.name, self.of or label, size, self.measure)
        return None if mean is None else mean.mean * self.unit


MINUTES = Cost("planned_seconds", "minutes of training", 1 / 60)
FLOPS = Cost("run_flops", "FLOPs of the run (10¹⁵)", 1e-15)


def colours(study: Study) -> dict[str, int]:
    """A colour for every label, the shared ones the same everywhere."""
    fixed = {row.label: FIXED[row.label] for row in study.rows if row.label in FIXED}
    free = [colour for colour in range(PALETTE) if colour not in fixed.values()]
    others = [row.label for row in study.rows if row.label not in FIXED]
    return {**fixed, **{label: (free or [0])[i % len(free or [0])] for i, label in enumerate(others)}}


def study_plots(study: Study, stats: Statistics, record: Records) -> list[Plot]:
    """Whatever the results allow, at the size most rows were run at; of several lengths, the longest."""
    sizes = [size for row in study.rows for size in stats.sizes(study.name, row.label)]
    if not sizes:
        return []
    size = (
        max(reversed(sizes), key=lambda name: read_variant(name)[1]) if study.lengths else statistics.mode(sizes)
    )
    plots = _by_length(study, stats) if study.lengths else []
    plots += [*_ends(study, stats, size), *_curves(study, stats, record, size)]
    plots += _speed_bars(study, stats, size)
    if study.frontier:
        plots += _frontiers(study, stats)
    else:
        plots += _speed_against_accuracy(study, stats, size)
    return plots


def _ends(study: Study, stats: Statistics, size: str) -> list[Plot]:
    """The held-out loss that each run ended with, where there are several seeds."""
    colour = colours(study)
    found = [(row.label, stats.values(study.name, row.label, size, "loss")) for row in study.rows]
    models = [Runs(label, values, colour[label]) for label, values in found if values]
    if len(models) < 2 or max(len(model.values) for model in models) < 2:
        return []
    lost = sum(sum(stats.collapses(study.name, row.label, size).values()) for row in study.rows)
    left_out = (
        f" {number_of(lost, 'run')} that collapsed {'is' if lost == 1 else 'are'} not drawn." if lost else ""
    )
    about = f"A dot is a run, a stroke their mean; further left is better. Size {size}.{left_out}"
    label = "cross-entropy on unseen text (nats a token)"
    return [Dots(f"{study.name}-ends", "Held-out loss of every run", about, models, label, "{:.3f}".format)]


def _curves(study: Study, stats: Statistics, record: Records, size: str) -> list[Plot]:
    """Held-out loss and accuracy along the way, the mean of the seeds; not of models that others continue."""
    loss, accuracy, colour, seeds = [], [], colours(study), set()
    for row in (row for row in study.rows if row.label not in study.continued):
        records = [r for key in stats.runs(study.name, row.label, size) if (r := record(key))]
        curves = [r["curves"]["held_out"] for r in records]
        if curves and (mean := mean_curve(curves)):
            seeds.add(len(curves))
            loss.append(Series(row.label, [(step, l) for step, l, _ in mean], colour[row.label]))
            accuracy.append(Series(row.label, [(step, a) for step, _, a in mean], colour[row.label]))
    if not loss:
        return []
    best = min(loss, key=lambda s: s.points[-1][1])
    ends = " and ".join(f"{s.name} {s.points[-1][1]:.3f}" for s in sorted(loss, key=lambda s: s.points[-1][1])[:2])
    high = max(accuracy, key=lambda s: s.points[-1][1])
    averaged = "one seed" if seeds == {1} else "the mean of the seeds"
    spans = all("model" not in row.settings for row in study.rows)
    about = " Sentinels between masked spans count, and are learned first." if spans else ""
    return [
        Lines(
            f"{study.name}-loss", "Held-out loss", f"Lower is better; {best.name} ends lowest ({ends}). "
            f"Size {size}; {averaged}.", loss, "step", "cross-entropy on unseen text (nats a token)",
            "{:.2f}".format,
        ),
        Lines(
            f"{study.name}-accuracy", "Held-out accuracy", f"Higher is better; {high.name} ends highest, at "
            f"{high.points[-1][1]:.2f} %.{about}",
            accuracy, "step", "accuracy on unseen text (%)", "{:.1f}".format,
        ),
    ]  # fmt: skip


def _by_length(study: Study, stats: Statistics) -> list[Plot]:
    """Of runs of several lengths: how far each model is from the baseline, against time; and loss and accuracy,
    against time and against FLOPs, a line a model."""
    time, plots = _time_axis(study, stats), list[Plot]()
    for metric in ("loss", "accuracy"):
        plots += _differences(study, stats, metric, time)
    for name, cost in (("time", time), ("FLOPs", FLOPS)):
        for metric in ("loss", "accuracy"):
            plots += _against_cost(study, stats, metric, name, cost)
    return plots


def _time_axis(study: Study, stats: Statistics) -> Cost:
    """Minutes; where a study gives speeds and none were measured, steps of the row whose time all rows take."""
    places = [(row.label, size) for row in study.rows for size in stats.sizes(study.name, row.label)]
    timed = any(MINUTES.find(study, stats, *place) is not None for place in places)
    if timed or not study.speeds or not study.equal_time:
        return MINUTES
    return Cost("steps", f"time, in steps of {study.equal_time}", 1.0, study.equal_time)


def _against_cost(study: Study, stats: Statistics, metric: str, name: str, cost: Cost) -> list[Plot]:
    series = []
    for row in study.rows:
        points = []
        for size in stats.sizes(study.name, row.label):
            x, y = cost.find(study, stats, row.label, size), stats.mean(study.name, row.label, size, metric)
            if x is not None and y is not None:
                points.append((x, y.mean))
        series.append(Series(row.label, sorted(points), colours(study)[row.label]))
    if max(len(s.points) for s in series) < 2:
        return []
    better, form = "lower" if metric == "loss" else "higher", METRICS[metric]
    return [
        Lines(
            f"{study.name}-{metric}-against-{name.lower()}", f"{form.title.capitalize()} against {name}",
            f"Each point is the end of a run of its own, with a schedule that ends there; {better} is "
            "better. Where a line crosses that of the dense model its method begins or ceases to pay.",
            series, cost.label, form.head, "{:.3f}".format if metric == "loss" else "{:.2f}".format,
        )
    ]  # fmt: skip


def _differences(study: Study, stats: Statistics, metric: str, cost: Cost) -> list[Plot]:
    """Differences between models are hundredths where the loss falls by a whole nat, so they have a plot of their
    own."""
    series = []
    for row in (row for row in study.rows if row.label != study.baseline):
        found = []
        for size in stats.sizes(study.name, row.label):
            x = cost.find(study, stats, row.label, size)
            difference = stats.difference(study, size, metric, row.label, study.baseline)
            if x is not None and difference is not None:
                found.append((x, difference.mean, difference.error or 0.0))
        if len(found) > 1:
            found.sort()
            points, errors = [(x, mean) for x, mean, _ in found], [error for _, _, error in found]
            series.append(Series(row.label, points, colours(study)[row.label], errors=errors))
    if not series:
        return []
    xs = sorted({x for s in series for x, _ in s.points})
    zero = Series(study.baseline, [(x, 0.0) for x in xs], colours(study)[study.baseline])
    below = "below" if metric == "loss" else "above"
    bars = " Bars are standard errors over seeds." if any(s.bars for s in series) else ""
    form = METRICS[metric]
    return [
        Lines(
            f"{study.name}-{metric}-difference", f"{form.title.capitalize()}: difference to {study.baseline}",
            f"Each point compares runs that end there; {below} the line of {study.baseline} a model is better."
            f"{bars}",
            [zero, *series], cost.label, f"difference in {form.head}",
            "{:+.3f}".format if metric == "loss" else "{:+.2f}".format,
        )
    ]  # fmt: skip


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float, float]]:
    """The mean at every step that all seeds recorded."""
    by_step = [{step: (loss, accuracy) for step, loss, accuracy in curve} for curve in curves]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return [
        (step, statistics.fmean(c[step][0] for c in by_step), statistics.fmean(c[step][1] for c in by_step))
        for step in common
    ]


def _speed_bars(study: Study, stats: Statistics, size: str) -> list[Plot]:
    """Speed relative to the baseline, one plot a kind of work, a bar a model."""
    return [
        plot
        for metric, kind in SPEEDS.items()
        if metric in study.measures and (plot := _bars(study, stats, size, metric, kind))
    ]


def _bars(study: Study, stats: Statistics, size: str, metric: str, kind: str) -> Plot | None:
    base, colour, bars = stats.mean(study.name, study.baseline, size, metric), colours(study), []
    for row in study.rows:
        speed = stats.mean(study.name, row.label, size, metric)
        if base is not None and speed is not None:
            ratio = speed.mean / base.mean
            bars.append(Bar(row.label, (ratio,), f"{ratio:.2f}×", colour[row.label]))
    if base is None or len(bars) < 2:
        return None
    if is_given(study, stats, size, metric):
        source = f"As {study.name} gives them, measured before."
    else:
        source = (
            f"Median over rounds in which the models took turns in one process, size {size}, on {base.hardware}."
        )
    return Bars(
        f"{study.name}-speed-{kind.replace(' ', '-')}",
        f"Speed of {kind} relative to {study.baseline}",
        f"Longer is faster; the line marks {study.baseline}. {source}",
        bars,
        1.0,
    )


def _speed_against_accuracy(study: Study, stats: Statistics, size: str) -> list[Plot]:
    """Each model's place: to the right is faster, upwards is better."""
    colour, points = colours(study), []
    for row in study.rows:
        speed, score = (stats.mean(study.name, row.label, size, m) for m in ("relative_speed", "accuracy"))
        base = stats.mean(study.name, study.baseline, size, "relative_speed")
        if speed and score and base:
            points.append(
                Point(row.label, speed.mean / base.mean, score.mean, colour[row.label], score.error or 0.0)
            )
    if len(points) < 2 or "relative_speed" not in study.measures:
        return []
    bars = " Bars are standard errors over seeds." if any(point.error for point in points) else ""
    return [
        Scatter(
            f"{study.name}-speed-accuracy", "Speed against accuracy", "Up is better, right is faster: above "
            f"and to the right of {study.baseline} a model wins on both.{bars}",
            points,
            f"training speed (× {study.baseline})", f"{METRICS['accuracy'].title} (%)",
        )
    ]  # fmt: skip


def _frontiers(study: Study, stats: Statistics) -> list[Plot]:
    """Score against latency with the line through the dense models, for training and for inference; of runs of
    several lengths the last."""
    plots: list[Plot] = []
    kinds = (("relative_speed", "training", "milliseconds a sequence in training", 1000.0),
             ("relative_forward", "forward", "milliseconds a batch, forward pass", 1.0))  # fmt: skip
    for metric, name, label, scale in kinds:
        places = frontier_points(study, stats, "accuracy", metric)
        if not places:
            continue
        largest = places[-1][0]
        alike = on_one_line(study, stats, largest, metric)
        places = [place for place in places if alike(place[0])]
        if is_given(study, stats, largest, metric):
            label, scale = f"time of a training step (× {study.baseline}'s)", 1.0
        dense = [(scale * time, score.mean) for _, l, time, score in places if l in study.frontier]
        if len(dense) < 2:
            continue
        own = colours(study)
        points = [
            Point(f"{l} · {s}" if len({p[0] for p in places}) > 1 else l, scale * time, score.mean,
                  0 if l in study.frontier else own[l])
            for s, l, time, score in places
        ]  # fmt: skip
        plots.append(
            Scatter(
                f"{study.name}-frontier-{name}", f"Accuracy against {name} latency",
                "The dashed line joins the dense models. A model above it reaches its accuracy sooner than "
                "any dense one; the horizontal distance to the line, over its latency, is the speedup.",
                points, label,
                "held-out accuracy (%)", dense, "dense models",
            )
        )  # fmt: skip
    return plots
