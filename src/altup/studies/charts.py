"""Charts as inline SVG: colours come from the page's style, so they follow light and dark."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from altup.studies.axes import (
    DOT,
    HEIGHT,
    LABEL_GAP,
    NAME_WIDTH,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Format,
    digits,
    place_names,
    spread,
    ticks,
)

FEW_POINTS = 16  # of a line; each then has a dot
ROW = 52  # of a bar chart
DOT_ROW = 38  # of a dot chart
STRIP = 150  # width of an interval


@dataclass(frozen=True)
class Series:
    """A line; `colour` counts through the palette of style.css (0 is the neutral one, for the baseline).

    The point at `mark` is drawn large. `errors` are half the heights of the points' bars, 0 for none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    mark: float | None = None
    errors: Sequence[float] = ()

    @property
    def bars(self) -> list[tuple[float, float, float]]:
        """The points that have an error: x, and the ends of the bar."""
        found = zip(self.points, self.errors, strict=bool(self.errors))
        return [(x, y - error, y + error) for (x, y), error in found if error]


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts, and what is written at its end."""

    name: str
    parts: Sequence[float]
    text: str
    colour: int


@dataclass(frozen=True)
class Point:
    """A named point; `error` is half the height of its bar."""

    name: str
    x: float
    y: float
    colour: int
    error: float = 0.0


@dataclass(frozen=True)
class Runs:
    """The numbers that a model's runs ended with, one a seed."""

    name: str
    values: Sequence[float]
    colour: int


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_format: Format = "{:.2f}".format,
    x_names: Sequence[str] = (),
) -> Markup:
    """Lines with their names at their ends; the page's script shows the values under the pointer.

    With `x_names` the places 0, 1, … have names instead of numbers.
    """
    series = [s for s in series if s.points]
    xs = [x for s in series for x, _ in s.points] or [0.0, 1.0]
    ys = [y for s in series for _, y in s.points] or [0.0, 1.0]
    ys += [y for s in series for _, *ends in s.bars for y in ends]
    names = max((len(s.name) for s in series), default=0)
    right = WIDTH - max(RIGHT, 24 + NAME_WIDTH * names)
    x_ticks = [x for x in ticks(0.0, max(xs)) if max(xs) < 1 or x == int(x)]
    most = max(xs) or 1.0
    x_format: Format = "{:,.0f}".format if all(x == int(x) for x in xs) else "{:.3g}".format
    if x_names:
        x_ticks, most = [float(i) for i in range(len(x_names))], max(len(x_names) - 1.0, 1.0)
        x_format = lambda x: x_names[round(x)]  # noqa: E731
    y_ticks = ticks(min(ys), max(ys))
    axes = Axes(0.0, most, x_ticks, min(ys), max(ys), y_ticks, right)
    parts = axes.draw(x_label, x_format, digits(y_ticks))
    drawn = [[axes.place(*point) for point in s.points] for s in series]
    heights = spread([line[-1][1] for line in drawn], LABEL_GAP, TOP + 6, axes.bottom - 4)
    hover = []
    for s, line, height in zip(series, drawn, heights, strict=True):
        path = "M" + "L".join(f"{x} {y}" for x, y in line)
        end_x, end_y = line[-1]
        parts.append(f'<path class="line c{s.colour}" d="{path}"/>')
        for x, low, high in s.bars:
            (across, bottom), (_, top) = axes.place(x, low), axes.place(x, high)
            parts.append(f'<line class="error c{s.colour}" x1="{across}" x2="{across}" y1="{bottom}" y2="{top}"/>')
        if len(line) <= FEW_POINTS:
            parts.extend(f'<circle class="dot c{s.colour}" cx="{x}" cy="{y}" r="3"/>' for x, y in line)
        parts.extend(
            f'<circle class="dot c{s.colour}" cx="{x}" cy="{y}" r="7"/>'
            for (x, y), point in zip(line, s.points, strict=True)
            if point[0] == s.mark
        )
        parts.append(f'<path class="leader c{s.colour}" d="M{end_x + 4} {end_y}L{axes.right + 13} {height}"/>')
        parts.append(
            f'<text class="name c{s.colour}" x="{axes.right + 17}" y="{height + 5}">{escape(s.name)}</text>'
        )
        shown = [(*at, x_format(x), y_format(y)) for at, (x, y) in zip(line, s.points, strict=True)]
        hover.append({"name": s.name, "colour": s.colour, "points": shown})
    data = {"x": x_label, "top": TOP, "bottom": axes.bottom, "series": hover}
    return _chart(parts, x_label, y_label, "data-hover", data)


def scatter_chart(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    line: Sequence[tuple[float, float]] = (),
    line_name: str = "",
) -> Markup:
    """Named points with their errors as bars, and a reference line; the script shows the point at the pointer."""
    xs = [p.x for p in points] + [x for x, _ in line] or [0.0, 1.0]
    ys = [y for p in points for y in (p.y - p.error, p.y + p.error)] + [y for _, y in line] or [0.0, 1.0]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x_format, y_format = digits(x_ticks), digits(y_ticks)
    axes = Axes(min(*xs, x_ticks[0]), max(*xs, x_ticks[-1]), x_ticks, min(ys), max(ys), y_ticks, right=WIDTH - 16)
    parts = axes.draw(x_label, x_format, y_format)
    if line:
        path = "M" + "L".join("{} {}".format(*axes.place(x, y)) for x, y in sorted(line))
        parts.append(f'<path class="line c0 frontier" d="{path}"><title>{escape(line_name)}</title></path>')
    places = [axes.place(p.x, p.y) for p in points]
    names = place_names([p.name for p in points], places, [axes.place(*at) for at in sorted(line)], axes)
    hover = []
    for p, (x, y), (beside, height, anchor) in zip(points, places, names, strict=True):
        if p.error:
            low, high = axes.place(p.x, p.y - p.error)[1], axes.place(p.x, p.y + p.error)[1]
            parts.append(f'<line class="error c{p.colour}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>')
        parts.append(f'<circle class="dot c{p.colour}" cx="{x}" cy="{y}" r="{DOT}"/>')
        parts.append(
            f'<text class="name c{p.colour}" x="{beside}" y="{height + 5}" text-anchor="{anchor}">'
            f"{escape(p.name)}</text>"
        )
        error = f" ± {y_format(p.error)}" if p.error else ""
        rows = [[x_label, x_format(p.x)], [y_label, y_format(p.y) + error]]
        hover.append({"name": p.name, "colour": p.colour, "x": x, "y": y, "rows": rows})
    return _chart(parts, x_label, y_label, "data-points", hover)


def _chart(parts: Sequence[str], x_label: str, y_label: str, attribute: str, data: Any) -> Markup:
    """The drawing in its frame, with what the script needs; arrow keys work as the pointer does."""
    return Markup(
        f'<div class="chart"><p class="unit">{escape(y_label)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(y_label)} over {escape(x_label)}" {attribute}="{escape(json.dumps(data))}">'
        + "".join(parts)
        + "</svg></div>"
    )


def bar_chart(bars: Sequence[Bar], part_names: Sequence[str] = (), reference: float | None = None) -> Markup:
    """Horizontal bars from 0 on a common scale, with a line at `reference`. Later parts are paler."""
    longest = max([sum(bar.parts) for bar in bars] + ([reference] if reference else [])) or 1.0
    scale = (WIDTH - 2) / longest
    rows = []
    for i, bar in enumerate(bars):
        y, x = i * ROW, 0.0
        rows.append(f'<text class="name c{bar.colour}" x="0" y="{y + 15}">{escape(bar.name)}</text>')
        rows.append(f'<text class="value" x="{WIDTH}" y="{y + 15}" text-anchor="end">{escape(bar.text)}</text>')
        for part, value in enumerate(bar.parts):
            rows.append(
                f'<rect class="bar c{bar.colour} part{part}" x="{x:.1f}" y="{y + 22}" '
                f'width="{value * scale:.1f}" height="18"/>'
            )
            x += value * scale
        if reference:
            at = f"{reference * scale:.1f}"
            rows.append(f'<line class="reference" x1="{at}" x2="{at}" y1="{y + 19}" y2="{y + 43}"/>')
    height = len(bars) * ROW
    legend = "".join(f'<span class="part{i}">{escape(name)}</span>' for i, name in enumerate(part_names))
    told = escape("; ".join(f"{bar.name}: {bar.text}" for bar in bars))
    return Markup(
        (f'<p class="legend">{legend}</p>' if legend else "")
        + f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{told}">'
        + "".join(rows)
        + "</svg>"
    )


def dot_chart(models: Sequence[Runs], label: str, form: Format) -> Markup:
    """A row a model: a dot for each of its runs, and a stroke at their mean, which is written at the end."""
    values = [value for model in models for value in model.values]
    x_ticks = ticks(min(values), max(values))
    left, right = NAME_WIDTH * max(len(model.name) for model in models) + 28, WIDTH - 70
    bottom = TOP + len(models) * DOT_ROW

    def place(value: float) -> float:
        return round(left + (right - left) * (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]), 1)

    parts, form_tick = [], digits(x_ticks)
    for x in x_ticks:
        parts.append(f'<line class="rule" x1="{place(x)}" x2="{place(x)}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="tick" x="{place(x)}" y="{bottom + 20}" text-anchor="middle">{form_tick(x)}</text>'
        )
    for i, model in enumerate(models):
        y, mean = TOP + DOT_ROW * (i + 0.5), statistics.fmean(model.values)
        parts.append(f'<text class="name c{model.colour}" x="0" y="{y + 5}">{escape(model.name)}</text>')
        at = place(mean)
        parts.append(f'<line class="line c{model.colour}" x1="{at}" x2="{at}" y1="{y - 12}" y2="{y + 12}"/>')
        parts += [
            f'<circle class="dot c{model.colour}" cx="{place(value)}" cy="{y}" r="5"/>' for value in model.values
        ]
        parts.append(f'<text class="value" x="{WIDTH}" y="{y + 5}" text-anchor="end">{form(mean)}</text>')
    middle = (left + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{bottom + 44}" text-anchor="middle">{escape(label)}</text>')
    told = escape("; ".join(f"{m.name}: {', '.join(map(form, m.values))}" for m in models))
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {bottom + 52}" role="img" aria-label="{told}">' + "".join(parts) + "</svg>"
    )


def interval_chart(mean: float, low: float, high: float, paper: float | None, higher: bool) -> Markup:
    """A difference as a dot with its interval as a line, zero as a rule, and the paper's difference as a ring.

    The side of zero that the claim needs is shaded: above it where `higher` is better, else below.
    """
    marks = [0.0, low, high, *([] if paper is None else [paper])]
    least, span = min(marks), max(marks) - min(marks) or 1.0
    least, span = least - 0.08 * span, 1.16 * span

    def place(value: float) -> float:
        return round(STRIP * (value - least) / span, 1)

    zero = place(0.0)
    begin, width = (zero, STRIP - zero) if higher else (0.0, zero)
    parts = [
        f'<rect class="wanted" x="{begin:.1f}" y="2" width="{width:.1f}" height="20"/>',
        f'<line class="axis" x1="{zero}" x2="{zero}" y1="0" y2="24"/>',
        f'<line class="interval" x1="{place(low)}" x2="{place(high)}" y1="12" y2="12"/>',
        f'<circle class="found" cx="{place(mean)}" cy="12" r="5"/>',
    ]
    if paper is not None:
        parts.append(f'<circle class="ring" cx="{place(paper)}" cy="12" r="5"/>')
    return Markup(f'<svg class="strip" viewBox="0 0 {STRIP} 24" aria-hidden="true">{"".join(parts)}</svg>')
