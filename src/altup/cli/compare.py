"""`altup compare`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from altup.core.terminal import Console
    from altup.studies.comparison import RunComparison


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN…", help="Folders of runs, or a study's records (results/runs/KEY.json)."),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file with the curves.")] = Path("compare.html"),
    page: Annotated[bool, typer.Option(help="Write the HTML file.")] = True,
) -> None:
    """Compare runs: curves, figures at the end, speed, and the settings in which they differ.

    Any runs will do: pretraining, fine-tuning, those of studies, finished. Differences are to
    the first one.
    """
    from altup.core.terminal import Console
    from altup.studies.comparison import RunComparison

    found = RunComparison.of(runs)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 80)
    if page:
        found.write(out)
    _show_figures(console, found)
    _show_curves(console, found)
    _show_differences(console, found)
    for remark in found.remarks():
        console.print(f"{remark}\n", style="yellow")
    if page:
        typer.echo(f"Page with the curves: {out}")


def _show_figures(console: Console, found: RunComparison) -> None:
    from altup.core.tables import print_table

    head, *rows = found.figures.lines
    print_table(console, [name.replace("held-out ", "held-out\n") for name in head], rows)


def _show_curves(console: Console, found: RunComparison) -> None:
    sparks = found.sparks()
    if sparks:
        console.print(f"{found.measures[0]}, from the first step to the last, all on one scale:")
        width = max(map(len, sparks))
        for name, spark in sparks.items():
            console.print(f"  {name:{width}}  {spark}")


def _show_differences(console: Console, found: RunComparison) -> None:
    from altup.core.tables import print_table

    changed = found.config_differences
    if changed:
        rows = [[name, *values] for name, values in changed.items()]
        print_table(console, ["setting", *found.names], rows, "\nWhat is different in their configs:")
    else:
        console.print("\nThe settings that decide what is computed are the same.\n")
    if line := found.describe_free_differences():
        console.print(f"{line}\n")
