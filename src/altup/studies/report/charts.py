"""Charts as inline SVG: colours come from the page's style, so they follow light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from altup.studies.report.page import Html, html

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 112, 14, 54
LABEL_GAP = 19  # between the names at the ends of lines
ROW = 52  # of a bar chart

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """A line; `colour` counts through the palette of style.css (0 is the neutral one, for the baseline)."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts, and what is written at its end."""

    name: str
    parts: Sequence[float]
    text: str
    colour: int


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_format: Format = "{:,.0f}".format,
    y_format: Format = "{:.2f}".format,
) -> Html:
    """Lines with their names at their ends; the page's script shows the values under the pointer."""
    series = [s for s in series if s.points]
    xs = [x for s in series for x, _ in s.points] or [0.0, 1.0]
    ys = [y for s in series for _, y in s.points] or [0.0, 1.0]
    x_ticks, y_ticks = ticks(0.0, max(xs)), ticks(min(ys), max(ys))
    x_end, y_low, y_high = max(xs) or 1.0, min(*ys, y_ticks[0]), max(*ys, y_ticks[-1])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (right - LEFT) * x / x_end, 1),
            round(bottom - (bottom - TOP) * (y - y_low) / ((y_high - y_low) or 1.0), 1),
        )

    parts = []
    for y in y_ticks:
        height = place(0, y)[1]
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{right}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{height + 5}" text-anchor="end">{y_format(y)}</text>')
    for x in (x for x in x_ticks if x <= x_end):
        across = place(x, y_low)[0]
        parts.append(f'<line class="axis" x1="{across}" x2="{across}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(
            f'<text class="tick" x="{across}" y="{bottom + 22}" text-anchor="middle">{x_format(x)}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html(x_label)}</text>')

    drawn = [[place(*point) for point in s.points] for s in series]
    heights = spread([line[-1][1] for line in drawn], LABEL_GAP, TOP + 6, bottom - 4)
    hover = []
    for s, line, height in zip(series, drawn, heights, strict=True):
        path = "M" + "L".join(f"{x} {y}" for x, y in line)
        end_x, end_y = line[-1]
        parts.append(f'<path class="line c{s.colour}" d="{path}"/>')
        if len(line) <= 16:
            parts.extend(f'<circle class="dot c{s.colour}" cx="{x}" cy="{y}" r="3"/>' for x, y in line)
        parts.append(f'<path class="leader c{s.colour}" d="M{end_x + 4} {end_y}L{right + 13} {height}"/>')
        parts.append(f'<text class="name c{s.colour}" x="{right + 17}" y="{height + 5}">{html(s.name)}</text>')
        shown = [(*at, x_format(x), y_format(y)) for at, (x, y) in zip(line, s.points, strict=True)]
        hover.append({"name": s.name, "colour": s.colour, "points": shown})
    data = html(json.dumps({"x": x_label, "top": TOP, "bottom": bottom, "series": hover}))
    return Html(
        f'<div class="chart"><p class="unit">{html(y_label)}</p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html(y_label)} over {html(x_label)}" '
        f'data-hover="{data}">' + "".join(parts) + "</svg></div>"
    )


def bar_chart(bars: Sequence[Bar], part_names: Sequence[str] = (), reference: float | None = None) -> Html:
    """Horizontal bars from 0 on a common scale, with a line at `reference`. Later parts are paler."""
    longest = max([sum(bar.parts) for bar in bars] + ([reference] if reference else [])) or 1.0
    scale = (WIDTH - 2) / longest
    rows = []
    for i, bar in enumerate(bars):
        y, x = i * ROW, 0.0
        rows.append(f'<text class="name c{bar.colour}" x="0" y="{y + 15}">{html(bar.name)}</text>')
        rows.append(f'<text class="value" x="{WIDTH}" y="{y + 15}" text-anchor="end">{html(bar.text)}</text>')
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
    legend = "".join(f'<span class="part{i}">{html(name)}</span>' for i, name in enumerate(part_names))
    return Html(
        (f'<p class="legend">{legend}</p>' if legend else "")
        + f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="'
        + html("; ".join(f"{bar.name}: {bar.text}" for bar in bars))
        + '">'
        + "".join(rows)
        + "</svg>"
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about so many."""
    span = high - low or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / about))
    step = min((m * magnitude for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(span / s - about))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places in the same order, moved as little as needed to be `gap` apart and, if they fit, in [low, high]."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = {}
    floor = low
    for i in order:
        moved[i] = floor = max(places[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= gap
    return [moved[i] for i in range(len(places))]
