"""The pages of reports: HTML with its style and script inside, readable offline, in light and in dark.

A page is a template of `templates/`; what is put into one is escaped, unless it is `Markup` already.
"""

from __future__ import annotations

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
    style, script = Markup(_read_asset("style.css")), Markup(_read_asset("script.js"))
    return _template(template).render(style=style, script=script, **content) + "\n"


def macro(name: str, *arguments: Any) -> Markup:
    """A part of a page."""
    return Markup(getattr(_template("parts.html").module, name)(*arguments))


def title_mark(title: str) -> bytes:
    """By which a page with this title is known."""
    return f"<title>{escape(title)}</title>".encode()


def standalone_svg(picture: Markup) -> str:
    """A chart as an SVG file of its own, with the page's style inside."""
    begin, end = picture.index("<svg"), picture.rindex("</svg>")
    opening, rest = str(picture)[begin:end].split(">", 1)
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{opening}><style>{_read_asset('style.css')}</style>{rest}</svg>\n"


def _read_asset(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Figure:
    """A picture with its title above and below it what to see in it; `name` is its anchor in the page."""

    title: str
    picture: Markup
    caption: str
    name: str = ""


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


def show_coefficient(value: float) -> str:
    """Two digits, with a real minus sign and no negative zero."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
