"""Tables for terminals in which every number stands whole, at any width: what is too wide is cut into several."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

    from altup.core.terminal import Console

PIPED = 160  # columns where their number is unknown
GAP = 2  # columns behind every column
NAMES = 0.4  # of the width, at most, for the names; longer ones take several lines
LEAST_NAME = 12  # columns that they keep, however wide a number is


def table_console(**options: Any) -> Console:
    """A console as wide as the terminal, or as COLUMNS says; a pipe takes wide tables."""
    from altup.core.terminal import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else PIPED, **options)


def print_table(
    console: Console,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    joined: Collection[int] = (),
) -> None:
    """Print the title and `fitting_tables`."""
    if title:
        console.print(title, style="bold", markup=False)
    for table in fitting_tables(head, rows, console.width, joined):
        console.print(table)
        console.print()


def fitting_tables(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, joined: Collection[int] = ()
) -> list[Table]:
    """One table, or several below one another that each repeat the first column, the names.

    No table is wider than `width`, and no cell is cut: only a name may take several lines. Of several tables, each
    leaves out the rows of which it has nothing. Heads and cells may have several lines. The columns `joined` stay
    with the one before them, if that leaves them room.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(head, *rows, strict=True)) if rows else [(one,) for one in head]
    wide = [max(_width(cell) for cell in column) for column in columns]
    numbers = [one + GAP for one in wide[1:]]
    alone = width + GAP - 1 - max(numbers, default=0) - GAP  # beside the widest column
    together = width + GAP - 1 - sum(numbers) - GAP  # beside all of them
    wide[0] = min(wide[0], max(LEAST_NAME, together, min(int(NAMES * width), alone)))
    tables = []
    for part in _parts(wide, width + GAP - 1, joined):
        lines = max(head[index].count("\n") for index in (0, *part))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for index in (0, *part):
            title = "\n" * (lines - head[index].count("\n")) + head[index]
            justify: JustifyMethod = "right" if index else "left"
            table.add_column(
                Text(title), justify=justify, no_wrap=index > 0, overflow="fold", max_width=wide[index]
            )
        for row in rows:
            if any(row[index] for index in part) or len(part) == len(head) - 1:
                table.add_row(*(Text(row[index]) for index in (0, *part)))
        tables.append(table)
    return tables


def _parts(wide: list[int], room: int, joined: Collection[int]) -> list[list[int]]:
    """The columns behind the names in as few tables as will do, in their order."""
    parts: list[list[int]] = [[]]
    free = room = room - wide[0] - GAP
    for index in range(1, len(wide)):
        needed = wide[index] + GAP
        if index + 1 in joined and needed + wide[index + 1] + GAP <= room:
            needed += wide[index + 1] + GAP
        if parts[-1] and needed > free:
            parts.append([])
            free = room
        parts[-1].append(index)
        free -= wide[index] + GAP
    return parts


def _width(cell: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in cell.split("\n")), default=0)
