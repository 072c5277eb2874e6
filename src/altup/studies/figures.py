"""The figures of a study: how its models learned, how fast they are, and accuracy against time, FLOPs and
speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from altup.studies.charts import Bar, Point, Series, bar_chart, line_chart, scatter_chart
from altup.studies.frontier import LATENCIES, frontier_points
from altup.studies.pages import Figure, HeatRow, macro, show_coefficient
from altup.studies.results import Record, Records
from altup.studies.scale import read_variant
from altup.studies.statistics import Statistics
from altup.studies.study import METRICS, Study

# Models that many studies share keep their colour through the report.
FIXED = {"Dense": 0, "AltUp K=2": 1, "Recycled K=2": 2, "AltUp K=4": 3}
PALETTE = 7
# What a run costs, along an axis: a measure, its label, and the unit that it is shown in.
COSTS = {
    "time": ("planned_seconds", "minutes of training", 1 / 60),
    "FLOPs": ("run_flops", "FLOPs of the run (10¹⁵)", 1e-15),
}


def colours(study: Study) -> dict[str, int]:
    """A colour for every label, the shared ones the same everywhere."""
    fixed = {row.label: FIXED[row.label] for row in study.rows if row.label in FIXED}
    free = [colour for colour in range(PALETTE) if colour not in fixed.values()] or [0]
    others = [row.label for row in study.rows if row.label not in FIXED]
    return {**fixed, **{label: free[i % len(free)] for i, label in enumerate(others)}}


def study_figures(study: Study, stats: Statistics, known: Records) -> list[Figure]:
    """Whatever the results allow, at the size most rows were run at; of several lengths, the longest."""
    sizes = [size for row in study.rows for size in stats.sizes(study.name, row.label)]
    if not sizes:
        return []
    size = max(reversed(sizes), key=lambda n: read_variant(n)[1]) if study.lengths else statistics.mode(sizes)
    found = _by_length(study, stats) if study.lengths else []
    found += _curves(study, stats, known, size)
    found += [bars for metric in LATENCIES if (bars := _speed_bars(study, stats, size, metric))]
    found += _frontiers(study, stats) if study.frontier else _speed_against_accuracy(study, stats, size)
    return found


def _curves(study: Study, stats: Statistics, known: Records, size: str) -> list[Figure]:
    """Held-out loss and accuracy along the way, the mean of the seeds; not of models that others continue."""
    loss, accuracy, colour = list[Series](), list[Series](), colours(study)
    for row in (row for row in study.rows if row.label not in study.continued):
        records = [record for key in stats.runs(study.name, row.label, size) if (record := known(key))]
        if records and (mean := mean_curve([record["curves"]["held_out"] for record in records])):
            loss.append(Series(row.label, [(step, l) for step, l, _ in mean], colour[row.label]))
            accuracy.append(Series(row.label, [(step, a) for step, _, a in mean], colour[row.label]))
    if not loss:
        return []
    about, percent = f"Size {size}; means over seeds.", METRICS["accuracy"].head
    return [
        _lines(study, "Held-out loss", loss, "step", METRICS["loss"].head, f"Lower is better. {about}", "{:.2f}"),
        _lines(study, "Held-out accuracy", accuracy, "step", percent, f"Higher is better. {about}", "{:.1f}"),
    ]  # fmt: skip


def _lines(
    study: Study, title: str, series: Sequence[Series], x: str, y: str, caption: str, form: str = "{:.3f}"
) -> Figure:
    name = f"{study.name}-{title.lower().replace(' ', '-').replace(':', '')}"
    return Figure(title, line_chart(series, x_label=x, y_label=y, y_format=form.format), caption, name)


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float, float]]:
    """The mean at every step that all seeds recorded."""
    by_step = [{step: (loss, accuracy) for step, loss, accuracy in curve} for curve in curves]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    return [
        (step, statistics.fmean(c[step][0] for c in by_step), statistics.fmean(c[step][1] for c in by_step))
        for step in common
    ]


def _by_length(study: Study, stats: Statistics) -> list[Figure]:
    """Of runs of several lengths: loss and accuracy against time and FLOPs, and the difference to the baseline,
    which is small beside what all of them gain."""
    found = []
    for what, (measure, label, unit) in COSTS.items():
        for metric in ("loss", "accuracy"):
            form = METRICS[metric]

            def cost(row: str, size: str, measure: str = measure, unit: float = unit) -> float | None:
                mean = stats.mean(study.name, row, size, measure)
                return None if mean is None else mean.mean * unit

            ends = _ends(study, stats, metric, cost)
            if max((len(s.points) for s in ends), default=0) > 1:
                better = "Higher is better" if form.higher else "Lower is better"
                caption = f"Each point is the end of a run with a schedule of its own length. {better}."
                found.append(
                    _lines(study, f"{form.title.capitalize()} against {what}", ends, label, form.head, caption)
                )
            gains = _gains(study, stats, metric, cost)
            if gains:
                side = "above" if form.higher else "below"
                caption = f"{side.capitalize()} the line of {study.baseline} is better. Bars are 95 % intervals."
                title = f"{form.title.capitalize()} against {what}: difference to {study.baseline}"
                found.append(_lines(study, title, gains, label, f"difference in {form.head}", caption, "{:+.3f}"))
    return found


Cost = Callable[[str, str], float | None]


def _ends(study: Study, stats: Statistics, metric: str, cost: Cost) -> list[Series]:
    found = []
    for row in study.rows:
        points = [
            (x, y.mean) for size in stats.sizes(study.name, row.label)
            if (x := cost(row.label, size)) is not None and (y := stats.mean(study.name, row.label, size, metric))
        ]  # fmt: skip
        found.append(Series(row.label, sorted(points), colours(study)[row.label]))
    return found


def _gains(study: Study, stats: Statistics, metric: str, cost: Cost) -> list[Series]:
    """A line a model, with intervals as bars, and that of the baseline at zero; empty with fewer than two
    lengths."""
    found = []
    for row in (row for row in study.rows if row.label != study.baseline):
        points = []
        for size in stats.sizes(study.name, row.label):
            x, d = cost(row.label, size), stats.difference(study, size, metric, row.label, study.baseline)
            if x is not None and d is not None:
                points.append((x, d.mean, d.high - d.mean if d.high is not None else 0.0))
        if len(points) > 1:
            points.sort()
            errors = [error for _, _, error in points]
            found.append(Series(row.label, [(x, y) for x, y, _ in points], colours(study)[row.label], errors))
    xs = sorted({x for s in found for x, _ in s.points})
    zero = Series(study.baseline, [(x, 0.0) for x in xs], colours(study)[study.baseline])
    return [zero, *found] if found else []


def _speed_bars(study: Study, stats: Statistics, size: str, metric: str) -> Figure | None:
    """Speed relative to the baseline, a bar a model."""
    base, bars = stats.mean(study.name, study.baseline, size, metric), []
    for row in study.rows:
        ratio = stats.relative(study, size, metric, row.label)
        if ratio is not None:
            bars.append(Bar(row.label, ratio, f"{ratio:.2f}×", colours(study)[row.label]))
    if base is None or len(bars) < 2 or metric not in study.measures:
        return None
    what = LATENCIES[metric][0]
    return Figure(
        f"Speed of {what} relative to {study.baseline}",
        bar_chart(bars, reference=1.0),
        f"Longer is faster. Median over rounds in which the models took turns, size {size}, on {base.hardware}.",
        f"{study.name}-speed-{what}",
    )


def _speed_against_accuracy(study: Study, stats: Statistics, size: str) -> list[Figure]:
    points = []
    for row in study.rows:
        ratio = stats.relative(study, size, "relative_speed", row.label)
        score = stats.mean(study.name, row.label, size, "accuracy")
        differs = stats.reason_against(study, size, "accuracy", row.label, study.baseline)
        if ratio is not None and score is not None and not differs:
            points.append(Point(row.label, ratio, score.mean, colours(study)[row.label], score.error or 0.0))
    if len(points) < 2 or "relative_speed" not in study.measures:
        return []
    x_label, y_label = f"training speed (× {study.baseline})", METRICS["accuracy"].head
    return [
        Figure(
            "Speed against accuracy", scatter_chart(points, x_label=x_label, y_label=y_label),
            f"Up is better, right is faster. Bars are standard errors over seeds. Size {size}.",
            f"{study.name}-speed-accuracy",
        )
    ]  # fmt: skip


def _frontiers(study: Study, stats: Statistics) -> list[Figure]:
    """Accuracy against latency with the line through the dense models; of runs of several lengths the last."""
    found = []
    for metric, unit, scale in (
        ("relative_speed", "ms a sequence", 1000.0),
        ("relative_forward", "ms a batch", 1.0),
    ):
        places = frontier_points(study, stats, "accuracy", metric)
        places = [p for p in places if read_variant(p[0])[1] == read_variant(places[-1][0])[1]]
        dense = [(scale * time, score.mean) for _, label, time, score in places if label in study.frontier]
        if len(dense) < 2:
            continue
        many = len({place[0] for place in places}) > 1
        points = [
            Point(f"{label} · {size}" if many else label, scale * time, score.mean,
                  0 if label in study.frontier else colours(study)[label])
            for size, label, time, score in places
        ]  # fmt: skip
        what = LATENCIES[metric][0]
        picture = scatter_chart(
            points, x_label=f"{what} latency ({unit})", y_label=METRICS["accuracy"].head, line=dense,
            line_name="dense models",
        )  # fmt: skip
        caption = (
            "The dashed line joins the dense models. A model above it reaches its accuracy sooner than any dense "
            "one; the horizontal distance to the line, over its latency, is the speedup."
        )
        found.append(Figure(f"Accuracy against {what} latency", picture, caption, f"{study.name}-frontier-{what}"))
    return found


# --- coefficients ---


def coefficient_figures(studies: Sequence[tuple[Study, Statistics]], known: Records) -> list[Figure]:
    """What the rule of every distinct model learned, of one seed."""
    shown: dict[str, Record] = {}
    for study, stats in studies:
        for row in study.rows:
            for size in stats.sizes(study.name, row.label):
                keys = stats.runs(study.name, row.label, size)
                record = known(keys[0]) if keys else None
                if record and record["coefficients"]:
                    shown.setdefault(f"{row.label} · {size}", record["coefficients"])
    found = [block_figure(title, entry["blocks"]) for title, entry in shown.items() if entry.get("blocks")]
    return found + [_sequence_figure(t, entry["sequence"]) for t, entry in shown.items() if entry.get("sequence")]


def block_figure(title: str, blocks: list[dict[str, Any]]) -> Figure:
    """P and g of every layer, coloured by how far they went."""
    count = range(len(blocks[0]["g"]))
    head = ["layer", *(f"P{_low(i)}{_low(j)}" for i in count for j in count), *(f"g{_low(i)}" for i in count)]
    start = [float(i == j) for i in count for j in count] + [1.0 for _ in count]
    rows = [
        HeatRow(
            f"{b['stack']} {b['layer'] + 1} · block {b['active'] + 1}",
            [*(value for line in b["P"] for value in line), *b["g"]],
            start,
        )
        for b in blocks
    ]
    full = max(abs(v - n) for row in rows for v, n in zip(row.values, row.neutral, strict=True)) or 1.0
    caption = f"Deepest colour {full:.2f} away from the start. “Block” is the one that the layer computed on."
    return Figure(title, macro("heat_map", head, rows, full), caption)


def _sequence_figure(title: str, strided: list[dict[str, Any]]) -> Figure:
    rows = [
        [f"{entry['stack']} {entry['layer'] + 1}", *(show_coefficient(v) for v in (*entry["a"], *entry["b"]))]
        for entry in strided
    ]
    return Figure(
        title,
        macro("table", ["layer", "a₁", "a₂", "b"], rows),
        "A skipped token is predicted as a₁ times itself plus a₂ times the kept token before it, and corrected by "
        "b times what the layer changed there. Starts: 1, 0, 1.",
    )


def _low(index: int) -> str:
    return str(index + 1).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
