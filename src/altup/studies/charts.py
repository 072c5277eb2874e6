"""Charts as inline SVG, the one drawing engine: colours come from the page's style, so they follow light and
dark."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 112, 14, 54
LABEL_GAP = 19  # between the names at the ends of lines
NAME_WIDTH = 8  # of a letter of these names, at least
DOT = 6  # radius of a named point

Format = Callable[[float], str]
FEW_POINTS = 16  # of a line; each then has a dot
ROW = 52  # of a bar chart
STRIP = 150  # width of an interval


@dataclass(frozen=True)
class Axes:
    """The frame of a chart: ranges in both directions and the ticks in them."""

    x_low: float
    x_high: float
    x_ticks: Sequence[float]
    y_least: float
    y_most: float
    y_ticks: Sequence[float]
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM

    @property
    def y_low(self) -> float:
        return min(self.y_least, self.y_ticks[0])

    def place(self, x: float, y: float) -> tuple[float, float]:
        y_high = max(self.y_most, self.y_ticks[-1])
        return (
            round(LEFT + (self.right - LEFT) * (x - self.x_low) / ((self.x_high - self.x_low) or 1.0), 1),
            round(self.bottom - (self.bottom - TOP) * (y - self.y_low) / ((y_high - self.y_low) or 1.0), 1),
        )

    def draw(self, x_label: str, x_format: Format, y_format: Format) -> list[str]:
        parts = []
        for y in self.y_ticks:
            height = self.place(self.x_low, y)[1]
            parts.append(f'<line class="rule" x1="{LEFT}" x2="{self.right}" y1="{height}" y2="{height}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 8}" y="{height + 5}" text-anchor="end">{y_format(y)}</text>'
            )
        for x in (x for x in self.x_ticks if self.x_low <= x <= self.x_high):
            across = self.place(x, self.y_low)[0]
            parts.append(
                f'<line class="axis" x1="{across}" x2="{across}" y1="{self.bottom}" y2="{self.bottom + 5}"/>'
            )
            parts.append(
                f'<text class="tick" x="{across}" y="{self.bottom + 22}" text-anchor="middle">{x_format(x)}</text>'
            )
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        middle = (LEFT + self.right) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
        )
        return parts


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about so many."""
    size = max(abs(low), abs(high)) or 1.0
    span = high - low if high - low > 1e-9 * size else size  # means of equal numbers differ in their last digits
    magnitude = 10.0 ** math.floor(math.log10(span / about))
    step = min((m * magnitude for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(span / s - about))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:  # all values are one: it stands in the middle
        first, last = first - 1, last + 1
    return [round(i * step, 12) for i in range(first, last + 1)]


def digits(found: Sequence[float]) -> Format:
    """As many digits as the ticks have, and two at least: 0.875 is not written as 0.88."""
    step = min((b - a for a, b in itertools.pairwise(found)), default=1.0)
    places = max(2, math.ceil(-math.log10(step) - 1e-9))
    if not math.isclose(round(step, places), step, rel_tol=1e-6):  # a step of 2.5
        places += 1
    return f"{{:.{places}f}}".format


@dataclass(frozen=True)
class Box:
    """A rectangle around a middle."""

    x: float
    y: float
    width: float
    height: float

    def covers(self, other: Box) -> float:
        """The area that two boxes have in common."""
        across = (self.width + other.width) / 2 - abs(self.x - other.x)
        down = (self.height + other.height) / 2 - abs(self.y - other.y)
        return max(across, 0.0) * max(down, 0.0)

    def leaves(self, axes: Axes) -> bool:
        """Whether it stands out of the frame, or on its lower edge."""
        inside = self.x - self.width / 2 > LEFT and self.x + self.width / 2 < WIDTH
        return not (inside and self.y - self.height / 2 >= TOP - 4 and self.y + self.height / 2 <= axes.bottom - 3)


def place_names(
    names: Sequence[str], places: Sequence[tuple[float, float]], line: Sequence[tuple[float, float]], axes: Axes
) -> list[tuple[float, float, str]]:
    """Where the names of points stand, as (x, middle, text-anchor): beside them, or a little above or below, where
    they cover least of the points, of the line and of the names before them."""
    drawn = [Box(x, y, 2 * DOT + 4, 2 * DOT + 4) for x, y in places]
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        pieces = max(1, round(math.hypot(x1 - x0, y1 - y0) / DOT))
        drawn += [Box(x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces, DOT, DOT) for i in range(pieces)]
    found = []
    for name, (x, y) in zip(names, places, strict=True):
        width = NAME_WIDTH * len(name)
        choices = []
        for aside, up in itertools.product((1, -1), range(0, 3 * LABEL_GAP, 3)):
            for down in (-up, up):
                box = Box(x + aside * (DOT + 5 + width / 2), y + down, width, LABEL_GAP - 3)
                cost = sum(map(box.covers, drawn)) + up + (aside < 0) + 1e6 * box.leaves(axes)
                choices.append((cost, box, aside))
        _, box, aside = min(choices, key=lambda choice: choice[0])
        drawn.append(box)
        found.append((round(x + aside * (DOT + 5), 1), round(box.y, 1), "start" if aside > 0 else "end"))
    return found


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


@dataclass(frozen=True)
class Series:
    """A line; `colour` counts through the palette of style.css (0 is the neutral one, for the baseline).

    `errors` are half the heights of the points' bars, 0 for none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    errors: Sequence[float] = ()

    @property
    def bars(self) -> list[tuple[float, float, float]]:
        """The points that have an error: x, and the ends of the bar."""
        found = zip(self.points, self.errors, strict=bool(self.errors))
        return [(x, y - error, y + error) for (x, y), error in found if error]


@dataclass(frozen=True)
class Bar:
    """A bar, and what is written at its end."""

    name: str
    value: float
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


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_format: Format = "{:.2f}".format,
) -> Markup:
    """Lines with their names at their ends; the page's script shows the values under the pointer."""
    series = [s for s in series if s.points]
    xs = [x for s in series for x, _ in s.points] or [0.0, 1.0]
    ys = [y for s in series for _, y in s.points] or [0.0, 1.0]
    ys += [y for s in series for _, *ends in s.bars for y in ends]
    names = max((len(s.name) for s in series), default=0)
    right = WIDTH - max(RIGHT, 24 + NAME_WIDTH * names)
    x_ticks = [x for x in ticks(0.0, max(xs)) if max(xs) < 1 or x == int(x)]
    most = max(xs) or 1.0
    x_format: Format = "{:,.0f}".format if all(x == int(x) for x in xs) else "{:.3g}".format
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


def bar_chart(bars: Sequence[Bar], reference: float) -> Markup:
    """Horizontal bars from 0 on a common scale, with a line at `reference`."""
    scale = (WIDTH - 2) / max([bar.value for bar in bars] + [reference])
    rows = []
    for i, bar in enumerate(bars):
        y, width, at = i * ROW, f"{bar.value * scale:.1f}", f"{reference * scale:.1f}"
        rows += [
            f'<text class="name c{bar.colour}" x="0" y="{y + 15}">{escape(bar.name)}</text>',
            f'<text class="value" x="{WIDTH}" y="{y + 15}" text-anchor="end">{escape(bar.text)}</text>',
            f'<rect class="bar c{bar.colour}" x="0" y="{y + 22}" width="{width}" height="18"/>',
            f'<line class="reference" x1="{at}" x2="{at}" y1="{y + 19}" y2="{y + 43}"/>',
        ]
    label = escape("; ".join(f"{bar.name}: {bar.text}" for bar in bars))
    frame = f'<svg viewBox="0 0 {WIDTH} {len(bars) * ROW}" role="img" aria-label="{label}">'
    return Markup(f"{frame}{''.join(rows)}</svg>")


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
