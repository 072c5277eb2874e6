"""Plots that can be put into the page, saved as an SVG of their own, and drawn as PNG."""

from __future__ import annotations

import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from altup.studies.axes import HEIGHT, WIDTH, Format
from altup.studies.charts import (
    FEW_POINTS,
    Bar,
    Point,
    Runs,
    Series,
    bar_chart,
    dot_chart,
    line_chart,
    scatter_chart,
)
from altup.studies.pages import read_asset

# The light palette of style.css, for drawings that have no page around them.
COLOURS = ("#4d4f53", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
HEAD = 52  # height of the title above an SVG of its own


@dataclass(frozen=True)
class Plot(ABC):
    """A titled picture. `name` is that of its files; `caption` says what to see."""

    name: str
    title: str
    caption: str

    @property
    @abstractmethod
    def picture(self) -> Markup:
        """The drawing for a page."""

    @abstractmethod
    def draw(self, axes: Any) -> None:
        """The same with matplotlib."""

    @property
    def unit(self) -> str:
        return ""

    @property
    @abstractmethod
    def content(self) -> frozenset[Any]:
        """The lines, points or bars with their names, whatever their colour."""

    def is_within(self, other: Plot) -> bool:
        """Whether another plot of the same kind shows all that this one does."""
        same = type(self) is type(other) and (self.title, self.unit) == (other.title, other.unit)
        return same and self.content <= other.content

    def save_svg(self, folder: Path) -> None:
        drawing = re.search(r"<svg viewBox=\"0 0 (\d+) (\d+)\".*?>(.*)</svg>", self.picture, re.DOTALL)
        assert drawing is not None
        width, height, content = int(drawing[1]), int(drawing[2]), drawing[3]
        style = read_asset("style.css")
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 {-HEAD} {width + 32} {height + HEAD + 12}">\n'
            f"<style>\n{style}\nsvg {{ font-family: system-ui, sans-serif; }}</style>\n"
            f'<rect class="paper" x="-16" y="{-HEAD}" width="{width + 32}" height="{height + HEAD + 12}"/>\n'
            f'<text class="title" x="0" y="-30">{escape(self.title)}</text>\n'
            f'<text class="tick" x="0" y="-10">{escape(self.unit)}</text>\n{content}\n</svg>\n'
        )
        (folder / f"{self.name}.svg").write_text(text, encoding="utf-8")

    def save_png(self, folder: Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        picture = Figure(figsize=(WIDTH / 80, HEIGHT / 80), dpi=160, layout="constrained")
        axes = FigureCanvasAgg(picture).figure.add_subplot()
        axes.set_title(self.title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        self.draw(axes)
        picture.savefig(folder / f"{self.name}.png")


@dataclass(frozen=True)
class Lines(Plot):
    series: Sequence[Series]
    x_label: str
    y_label: str
    y_format: Format = "{:.2f}".format
    x_names: Sequence[str] = ()

    @property
    def unit(self) -> str:
        return self.y_label

    @property
    def content(self) -> frozenset[Any]:
        return frozenset(
            (self.x_label, tuple(self.x_names), s.name, tuple(s.points), s.mark, tuple(s.errors))
            for s in self.series
        )

    @property
    def picture(self) -> Markup:
        return line_chart(
            self.series, x_label=self.x_label, y_label=self.y_label, y_format=self.y_format, x_names=self.x_names
        )

    def draw(self, axes: Any) -> None:
        for s in (s for s in self.series if s.points):
            xs, ys = zip(*s.points, strict=True)
            dots = "o" if len(xs) <= FEW_POINTS else None
            axes.plot(xs, ys, color=COLOURS[s.colour], label=s.name, marker=dots, markersize=4)
            for x, low, high in s.bars:
                axes.plot([x, x], [low, high], color=COLOURS[s.colour], linewidth=1.5)
            marked = [point for point in s.points if point[0] == s.mark]
            axes.scatter([x for x, _ in marked], [y for _, y in marked], color=COLOURS[s.colour], s=60)
        if self.x_names:
            axes.set_xticks(range(len(self.x_names)), self.x_names)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        axes.legend(frameon=False, fontsize=8)


@dataclass(frozen=True)
class Scatter(Plot):
    points: Sequence[Point]
    x_label: str
    y_label: str
    line: Sequence[tuple[float, float]] = ()
    line_name: str = ""

    @property
    def unit(self) -> str:
        return self.y_label

    @property
    def content(self) -> frozenset[Any]:
        return frozenset((self.x_label, tuple(self.line), p.name, p.x, p.y, p.error) for p in self.points)

    @property
    def picture(self) -> Markup:
        return scatter_chart(
            self.points, x_label=self.x_label, y_label=self.y_label, line=self.line, line_name=self.line_name
        )

    def draw(self, axes: Any) -> None:
        if self.line:
            axes.plot(
                *zip(*sorted(self.line), strict=True), color=COLOURS[0], linestyle="--", label=self.line_name
            )
        for p in self.points:
            axes.errorbar(p.x, p.y, p.error or None, fmt="o", color=COLOURS[p.colour], label=p.name, capsize=3)
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        axes.legend(frameon=False, fontsize=8)


@dataclass(frozen=True)
class Bars(Plot):
    bars: Sequence[Bar]
    reference: float | None = None

    @property
    def content(self) -> frozenset[Any]:
        return frozenset((self.reference, bar.name, tuple(bar.parts), bar.text) for bar in self.bars)

    @property
    def picture(self) -> Markup:
        return bar_chart(self.bars, reference=self.reference)

    def draw(self, axes: Any) -> None:
        for place, bar in enumerate(reversed(self.bars)):
            axes.barh(place, sum(bar.parts), color=COLOURS[bar.colour])
        axes.set_yticks(
            range(len(self.bars)), [f"{bar.name}\n{bar.text}" for bar in reversed(self.bars)], fontsize=8
        )
        if self.reference:
            axes.axvline(self.reference, color="black", linewidth=1)


@dataclass(frozen=True)
class Dots(Plot):
    models: Sequence[Runs]
    x_label: str
    x_format: Format

    @property
    def unit(self) -> str:
        return self.x_label

    @property
    def content(self) -> frozenset[Any]:
        return frozenset((m.name, tuple(m.values)) for m in self.models)

    @property
    def picture(self) -> Markup:
        return dot_chart(self.models, self.x_label, self.x_format)

    def draw(self, axes: Any) -> None:
        for i, m in enumerate(reversed(self.models)):
            colour, mean = COLOURS[m.colour], statistics.fmean(m.values)
            axes.scatter(m.values, [i] * len(m.values), color=colour, s=40, zorder=3)
            axes.plot([mean, mean], [i - 0.25, i + 0.25], color=colour, linewidth=2)
            axes.annotate(
                self.x_format(mean),
                (mean, i + 0.25),
                (0, 3),
                textcoords="offset points",
                ha="center",
                color=colour,
            )
        axes.set_yticks(range(len(self.models)), [m.name for m in reversed(self.models)])
        axes.set(xlabel=self.x_label, ylim=(-0.6, len(self.models) - 0.3))


def share_plots(drawn: dict[str, list[Plot]]) -> tuple[dict[str, list[Plot]], dict[str, list[tuple[Plot, str]]]]:
    """The plots without those that another study's plot holds; and these, each with the name of that study."""
    places = [(name, plot) for name, plots in drawn.items() for plot in plots]
    kept: dict[str, list[Plot]] = {name: [] for name in drawn}
    shared: dict[str, list[tuple[Plot, str]]] = {name: [] for name in drawn}
    for place, (name, plot) in enumerate(places):
        within = [
            other_name
            for other_place, (other_name, other) in enumerate(places)
            if other_place != place
            and plot.is_within(other)
            and (other_place < place or not other.is_within(plot))  # of two that are the same the first stays
        ]
        # Of several that hold it, the last in a chain of ever larger ones is not dropped itself.
        largest = max(
            within, key=lambda n: max(len(p.content) for p in drawn[n] if plot.is_within(p)), default=None
        )
        if largest is None:
            kept[name].append(plot)
        else:
            shared[name].append((plot, largest))
    return kept, shared


def save_plots(plots: Sequence[Plot], folder: Path) -> None:
    """Every plot as NAME.svg and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        plot.save_svg(folder)
        plot.save_png(folder)
