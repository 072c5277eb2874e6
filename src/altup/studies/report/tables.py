"""Tables, tables that can be sorted and filtered, and heat maps that are tables whose cells are coloured."""

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
        f'{above}<div class="scroll" tabindex="0" role="region" aria-label="table"><table>\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


@dataclass(frozen=True)
class Cell:
    """What stands in a cell, smaller text below it, and the value it is sorted by (without one, the text)."""

    text: str
    below: str = ""
    value: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Column:
    """`group` is the common head over neighbouring columns that bear the same."""

    name: str
    group: str = ""
    text: bool = False


def data_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], caption: str, filters: bool = False
) -> Html:
    """A table whose heads sort it and, with `filters`, a field above that hides the rows without its text."""
    field = (
        '<p class="filter"><label>Show rows with <input type="search" placeholder="any text"></label> '
        f'<output aria-live="polite">{len(rows)} rows</output></p>\n'
        if filters
        else ""
    )
    body = "\n".join(
        "<tr>"
        + "".join(_cell(cell, column, column is columns[0]) for cell, column in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    return Html(
        f'<div class="data">{field}<div class="scroll" tabindex="0" role="region" aria-label="{html(caption)}">'
        f'<table class="sortable">\n<thead>{_groups(columns)}<tr>'
        + "".join(_head(column) for column in columns)
        + f'</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n<p class="note">{html(caption)}</p></div>'
    )


def _cell(cell: Cell, column: Column, first: bool) -> str:
    value = f' data-value="{cell.value!r}"' if cell.value is not None else ""
    kind = " ".join(filter(None, (cell.kind, "text" if column.text else "")))
    kind = f' class="{kind}"' if kind else ""
    below = f"<small>{html(cell.below)}</small>" if cell.below else ""
    return (
        f'<th scope="row"{kind}{value}>{html(cell.text)}{below}</th>'
        if first
        else f"<td{kind}{value}>{html(cell.text)}{below}</td>"
    )


def _head(column: Column) -> str:
    kind = ' class="text"' if column.text else ""
    return f'<th scope="col"{kind}><button type="button">{html(column.name)}</button></th>'


def _groups(columns: Sequence[Column]) -> str:
    if not any(column.group for column in columns):
        return ""
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group and column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
    heads = (
        f'<th scope="colgroup" colspan="{width}">{html(name)}</th>' if name else "<td></td>"
        for name, width in spans
    )
    return f'<tr class="groups">{"".join(heads)}</tr>'


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
        '<div class="scroll" tabindex="0" role="region" aria-label="heat map"><table class="heat">\n'
        f"<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )
