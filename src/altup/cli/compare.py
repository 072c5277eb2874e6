"""`altup compare`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from altup.studies.run_comparison import RunComparison


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN…", help="Folders of runs, or a study's records (results/runs/KEY.json)."),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file with the curves.")] = Path("compare.html"),
    page: Annotated[bool, typer.Option(help="Write the HTML file.")] = True,
) -> None:
    """Compare runs: curves, figures at the end, speed, and the settings in which they differ.

    Any runs will do: pretraining, fine-tuning, those of studies, finished or still going on. Differences are to
    the first one.
    """
    from rich.console import Console

    from altup.studies.run_comparison import RunComparison

    found = RunComparison.of(runs)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    if page:
        found.write(out)
    _show_figures(console, found)
    _show_curves(console, found)
    _show_differences(console, found)
    for remark in found.remarks():
        console.print(f"\n{remark}", style="yellow")
    if page:
        typer.echo(f"\nPage with the curves: {out}")


def _table(head: list[str], rows: list[list[str]], left: int = 1) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_fitting(console: Any, head: list[str], rows: list[list[str]], left: int = 1) -> None:
    """A table, or where it is wider than the terminal a paragraph for each of its rows: nothing is cut."""
    table = _table([name.replace("held-out ", "held-out\n") for name in head], rows, left)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(table)
        return
    width = max(map(len, head[1:]), default=0)
    for row in rows:
        console.print(f"\n{row[0]}", style="bold")
        for name, cell in zip(head[1:], row[1:], strict=True):
            console.print(f"  {name:{width}}  {cell}")
    console.print()


def _show_figures(console: Any, found: RunComparison) -> None:
    _print_fitting(console, found.head, found.rows())


def _show_curves(console: Any, found: RunComparison) -> None:
    sparks = found.sparks()
    if sparks:
        console.print(f"{found.measures[0]}, from the first step to the last, all on one scale:")
        width = max(map(len, sparks))
        for name, spark in sparks.items():
            console.print(f"  {name:{width}}  {spark}")


def _show_differences(console: Any, found: RunComparison) -> None:
    changed = found.config_differences
    if not changed:
        console.print("\nTheir configs are the same.")
        return
    console.print("\nWhat is different in their configs:")
    rows = [[name, *values] for name, values in changed.items()]
    _print_fitting(console, ["setting", *found.names], rows, left=1 + len(found.names))
