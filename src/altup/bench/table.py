"""Rows for the eye: one table a problem, one line a provider."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from altup.bench.rows import OK, Row

if TYPE_CHECKING:
    from rich.table import Table

TIMES = ("forward", "backward", "both", "update", "generate", "produce", "copy")
WHOLE = ("both", "update", "generate", "produce", "copy")
NOTE = 60  # characters of a note that are shown; files keep the whole
OTHERS = {"overhead": "{:+.1%}", "floor": "{:+.1%}", "fraction": "{:.1%}", "overhead/floor": "{:.2f}×"}


def by_problem(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows under the title of their problem, in the order they came."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[title(row)].append(row)
    return groups


def title(row: Row) -> str:
    return f"{row.case}: " + ", ".join(f"{name} {value}" for name, value in row.sizes.items())


def by_provider(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.provider].append(row)
    return groups


def find(rows: Sequence[Row], metric: str, modes: Sequence[str] = ()) -> Row | None:
    """The last such row: a file may hold several runs."""
    found = [
        row for row in rows if row.metric == metric and (not modes or row.mode in modes) and row.p50 is not None
    ]
    return found[-1] if found else None


def build_table(name: str, rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table

    modes = [mode for mode in TIMES if any(row.mode == mode and row.metric == "ms" for row in rows)]
    measured = {row.metric for row in rows if row.p50 is not None}
    rates = sorted(metric for metric in measured if metric.endswith("/s"))
    others = [metric for metric in ("GiB", "s", "speedup", *OTHERS) if metric in measured]
    table = Table(title=name, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("provider", no_wrap=True)
    headings = {"s": "start s", "speedup": "×"}
    for heading in [*(f"{mode} ms" for mode in modes), *rates, *(headings.get(o, o) for o in others)]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for provider, mine in sorted(by_provider(rows).items(), key=lambda item: find(item[1], "ms") is None):
        bad = next((row for row in mine if row.status != OK), None)
        cells = [_time(find(mine, "ms", [mode])) for mode in modes]
        cells += [_number(find(mine, rate)) for rate in rates]
        cells += [_other(find(mine, metric)) for metric in others]
        note = (
            f"{bad.status}: {bad.note}" if bad and not any(cells) else "floor" if mine[0].kind == "floor" else ""
        )
        table.add_row(provider, *cells, _short(note))
    return table


def print_tables(rows: Iterable[Row]) -> None:
    import sys

    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for name, mine in by_problem(rows).items():
        console.print(build_table(name, mine))


def _short(note: str) -> str:
    """A note on one line: what failed stands at its beginning."""
    line = " ".join(note.split())
    return line if len(line) <= NOTE else f"{line[: NOTE - 1].rstrip()}…"


def _time(row: Row | None) -> str:
    return "" if row is None or row.p50 is None else f"{row.p50:.3g}" if row.p50 < 100 else f"{row.p50:.1f}"


def _number(row: Row | None) -> str:
    return "" if row is None or row.p50 is None else f"{row.p50:,.0f}" if row.p50 >= 100 else f"{row.p50:.3g}"


def _other(row: Row | None) -> str:
    if row is None or row.p50 is None:
        return ""
    return OTHERS.get(row.metric, "{:.2f}").format(row.p50)
