"""The frame of a chart: where its axes, ticks and names stand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 112, 14, 54
LABEL_GAP = 19  # between the names at the ends of lines
NAME_WIDTH = 8  # of a letter of these names, at least
DOT = 6  # radius of a named point

Format = Callable[[float], str]


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
