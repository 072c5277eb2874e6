"""The pages of reports: HTML with its style and script inside, readable offline, in light and in dark.

A page is a template of `templates/`; what is put into one is escaped, unless it is `Markup` already.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape


@cache
def _template(name: str) -> Template:
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    return Environment(loader=PackageLoader(__package__), autoescape=True, **options).get_template(name)


def render(template: str, **content: Any) -> str:
    """A whole page."""
    style, script = Markup(read_asset("style.css")), Markup(read_asset("script.js"))
    return _template(template).render(style=style, script=script, **content) + "\n"


def title_mark(title: str) -> bytes:
    """By which a page with this title is known."""
    return f"<title>{escape(title)}</title>".encode()


def read_asset(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Figure:
    """A picture with its title above and below it what to see in it; `name` is its place in the page."""

    title: str
    picture: Markup
    caption: str
    name: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell's text, smaller text below it, and the value it is sorted by (the text by default)."""

    text: str | int
    below: str = ""
    value: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Column:
    """`group` is the common head over neighbouring columns of the same group."""

    name: str
    group: str = ""
    text: bool = False


@dataclass(frozen=True)
class DataTable:
    """A table that its heads sort and, with `filters`, a field above it searches."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str
    filters: bool = False

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The common heads and how many columns each spans; none where no column has one."""
        if not any(column.group for column in self.columns):
            return []
        runs = itertools.groupby(enumerate(self.columns), lambda c: c[1].group or c[0])
        return [(name if isinstance(name, str) else "", len(list(columns))) for name, columns in runs]

    def __html__(self) -> str:
        return _template("parts.html").module.data_table(self)  # type: ignore[attr-defined]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Markup:
    """A plain table: the first column names the row, the others are numbers."""
    return _template("parts.html").module.table(head, rows, caption)  # type: ignore[attr-defined]


def show_coefficient(value: float) -> str:
    """Two digits, with a real minus sign and no negative zero."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


@dataclass(frozen=True)
class HeatRow:
    """`values` are printed; `neutral` are the values at which a cell has no colour."""

    name: str
    values: Sequence[float]
    neutral: Sequence[float]

    def cells(self, full: float) -> Iterator[dict[str, str]]:
        for value, neutral in zip(self.values, self.neutral, strict=True):
            depth = min(abs(value - neutral) / full, 1.0)
            side = "above" if value > neutral else "below"
            yield {"side": side, "depth": f"{depth:.3f}", "text": show_coefficient(value)}


def heat_map(head: Sequence[str], rows: Sequence[HeatRow], full: float) -> Markup:
    """One colour above the neutral value and another below it, deepest at a distance of `full`."""
    return _template("parts.html").module.heat_map(head, rows, full)  # type: ignore[attr-defined]
