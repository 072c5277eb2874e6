"""Tables, and heat maps that are tables whose cells are coloured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from altup.studies.report.page import Html, html


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Html:
    """The first column names the row; the others are numbers, aligned to the right."""
    above = f'<p class="note">{html(caption)}</p>\n' if caption else ""
    names = "".join(f'<th scope="col">{html(name)}</th>' for name in head)
    body = "\n".join(
        f'<tr><th scope="row">{html(row[0])}</th>'
        + "".join(f"<td>{html(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return Html(
        f'{above}<div class="scroll"><table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def facts(pairs: Sequence[tuple[str, str]]) -> Html:
    """Names and what they stand for, as a list."""
    rows = "".join(f"<dt>{html(name)}</dt><dd>{html(value)}</dd>" for name, value in pairs)
    return Html(f'<dl class="facts">{rows}</dl>')


def signed(value: float) -> str:
    """Two digits, with a real minus sign and no negative zero."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


@dataclass(frozen=True)
class HeatRow:
    """`values` are printed; `neutral` are the values at which a cell has no colour."""

    name: str
    values: Sequence[float]
    neutral: Sequence[float]


def heat_map(head: Sequence[str], rows: Sequence[HeatRow], full: float) -> Html:
    """One colour above the neutral value and another below it, deepest at a distance of `full`."""

    def cell(value: float, neutral: float) -> str:
        depth = min(abs(value - neutral) / full, 1.0)
        side = "above" if value > neutral else "below"
        return f'<td class="{side}" style="--depth:{depth:.3f}">{signed(value)}</td>'

    names = "".join(f'<th scope="col">{html(name)}</th>' for name in head)
    body = "\n".join(
        f'<tr><th scope="row">{html(row.name)}</th>'
        + "".join(cell(value, neutral) for value, neutral in zip(row.values, row.neutral, strict=True))
        + "</tr>"
        for row in rows
    )
    return Html(
        f'<div class="scroll"><table class="heat">\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )
