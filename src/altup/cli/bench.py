"""`altup bench`: speed and memory on this machine, against peers, in one run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from altup.bench.cases import CASES
from altup.core.errors import UserError, check_choice, check_whole

if TYPE_CHECKING:
    from altup.bench.rows import Machine

SIZES = ("small", "base", "large", "xl")
CASE_LIST = "; ".join(f"{name} ({case.question})" for name, case in CASES.items())


def command(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Which ones, of: {CASE_LIST}.", show_default="all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes: about a minute, on a CPU too.")] = False,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help=f"Model of `step`: {', '.join(SIZES)}. Repeatable.", show_default="base"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Providers to run, such as 'altup*'. Repeatable.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", help="Rounds of timing.", show_default="10; 3 with --quick")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds after which nothing more is begun.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Add the rows, as they come, to this .csv or .jsonl file.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw bars into this .png, .svg or .pdf.")] = None,
    show: Annotated[
        Path | None, typer.Option("--show", help="Measure nothing: show the rows of this file instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines, not tables.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV, not tables.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Measure the start of compiled providers alone, without any cache.")
    ] = False,
) -> None:
    """Measure speed and memory here, beside peers: every ratio comes from one run.

    Providers of a case take turns; one whose result does not agree with the reference is reported and not timed,
    and one that fails does not stop the others. Exit code 1 if one of ours disagreed.

    Examples:

        altup bench --quick

        altup bench step --size base --size large --out results.csv --time-limit 540

        altup bench rule attention head --plot kernels.png

        altup bench step --only 'altup k2' --only dense --repeat 20

        altup bench step --size large --cold

        altup bench --show results.csv --plot results.png
    """
    names = list(cases or CASES)
    for name in names:
        check_choice("case", name, CASES)
    for name in size or ():
        check_choice("--size", name, SIZES)
    if repeat is not None:
        check_whole("--repeat", repeat, 1)
    if time_limit is not None and not time_limit > 0:
        raise UserError(f"--time-limit {time_limit:g} makes no sense; give a number of seconds above 0")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: name a file that ends in .png, .svg or .pdf")
    if as_json and as_csv:
        raise UserError("--json and --csv both print the rows; choose one")
    if show is not None:
        from altup.bench.rows import Sheet, read_rows

        stored = [(row, machine) for row, machine in read_rows(show) if row.case in names]
        rows = [row for row, _ in stored]
        if not rows:
            raise UserError(f"--show {show}: holds no rows of {', '.join(names)}")
        if as_json or as_csv:
            sheet = Sheet(sys.stdout, stored[0][1], as_json)
            for row, machine in stored:
                sheet.add(row, machine)
    else:
        if cold:
            fresh = tempfile.mkdtemp(prefix="altup-bench-")
            os.environ.update(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1", TRITON_CACHE_DIR=fresh)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from altup.bench.rows import Sheet  # torch reads the environment when it is imported
        from altup.bench.runner import measure

        def open_sheets(machine: Machine) -> list[Sheet]:
            stored = [Sheet(out, machine)] if out is not None else []
            return [*stored, *([Sheet(sys.stdout, machine, as_json)] if as_json or as_csv else [])]

        rows = measure(
            names,
            size or ["base"],
            quick=quick,
            only=only or (),
            rounds=repeat,
            time_limit=time_limit or float("inf"),
            cold=cold,
            open_sheets=open_sheets,
            say=lambda text: typer.echo(text, err=True),
        )
    if not (as_json or as_csv):
        from altup.bench.show import print_tables

        print_tables(rows)
    if plot is not None:
        from altup.bench.show import draw

        draw(rows, plot)
    if any(row.status == "disagrees" and row.kind == "ours" for row in rows):
        raise typer.Exit(1)
