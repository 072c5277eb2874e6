"""Tables for terminals in which every number stands whole, at any width: what is too wide is cut into several."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED = 160  # columns where nobody says how many there are
GAP = 2  # columns behind every column
NAMES = 0.4  # of the width, at most, for the names; longer ones take several lines
LEAST_NAME = 12  # columns that they keep, however wide a number is


def table_console(**options: Any) -> Console:
    """A console as wide as the terminal, or as COLUMNS says; a pipe takes wide tables."""
    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else PIPED, **options)


def print_table(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", names: int = 1
) -> None:
    """Print the title and `fitting_tables`."""
    if title:
        console.print(title, style="bold", markup=False)
    for table in fitting_tables(head, rows, console.width, names):
        console.print(table)
        console.print()


def fitting_tables(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, names: int = 1) -> list[Table]:
    """One table, or several below one another that each repeat the first `names` columns.

    No table is wider than `width`, and no cell is cut: only a name may take several lines. Of several tables, each
    leaves out the rows of which it has nothing.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(head, *rows, strict=True)) if rows else [(one,) for one in head]
    wide = [max(_width(cell) for cell in column) for column in columns]
    widest, most = max(wide[names:], default=0) + GAP, int(NAMES * width) // names
    for index in range(names):
        wide[index] = min(wide[index], max(LEAST_NAME, min(most, (width + 1 - widest) // names - GAP)))
    left = sum(one + GAP for one in wide[:names])
    tables = []
    for part in _parts([one + GAP for one in wide[names:]], width + GAP - 1 - left):
        chosen = [*range(names), *(names + index for index in part)]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for index in chosen:
            is_name = index < names
            table.add_column(
                Text(head[index]), justify="left" if is_name else "right", no_wrap=not is_name,
                overflow="fold", max_width=wide[index], vertical="bottom",
            )  # fmt: skip
        for row in rows:
            if any(row[index] for index in chosen[names:]) or len(chosen) == len(head):
                table.add_row(*(Text(row[index]) for index in chosen))
        tables.append(table)
    return tables


def _parts(widths: list[int], room: int) -> list[list[int]]:
    """The columns in as few tables as will do, in their order."""
    parts: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if parts[-1] and used + width > room:
            parts.append([])
            used = 0
        parts[-1].append(index)
        used += width
    return parts


def _width(cell: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in cell.split("\n")), default=0)
