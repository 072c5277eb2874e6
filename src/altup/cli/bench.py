"""`altup bench`: speed and memory on this machine, against peers, in one run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from altup.bench.cases import CASES, BenchConfig
from altup.cli.options import with_settings
from altup.core.errors import UserError

if TYPE_CHECKING:
    from altup.bench.rows import BenchRow, Machine

CASE_LIST = "; ".join(f"{name} ({case.question})" for name, case in CASES.items())


@with_settings(BenchConfig)
def command(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Which ones, of: {CASE_LIST}.", show_default="all")
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
    **settings: Any,
) -> None:
    """Measure speed and memory here, beside peers: every ratio comes from one run.

    Providers of a case take turns; one whose result does not agree with the reference is reported and not timed,
    and one that fails does not stop the others. Exit code 1 if one of altup's disagreed.

    Examples:

        altup bench --quick

        altup bench step --size base --size large --out results.csv --time-limit 540

        altup bench rule attention head --plot kernels.png

        altup bench step --only 'altup k2' --only dense --repeat 20

        altup bench step --size large --cold

        altup bench --show results.csv --plot results.png
    """
    config = BenchConfig(cases=cases or [], **settings)
    if show is not None and out is not None:
        raise UserError(f"--out {out} is for rows that are measured, and --show measures nothing; remove one")
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: name a file that ends in .png, .svg or .pdf")
    if plot is not None:
        from altup.core.files import PDF, PNG, SVG, refuse_foreign

        mark, kind = {".png": (PNG, "a PNG"), ".svg": (SVG, "an SVG"), ".pdf": (PDF, "a PDF")}[plot.suffix]
        refuse_foreign(plot, [mark], kind, "--plot")
    if as_json and as_csv:
        raise UserError("--json and --csv both print the rows; choose one")
    printed = sys.stdout if as_json or as_csv else None
    rows = _measure(config, out, printed, as_json) if show is None else _stored(config, show, printed, as_json)
    if not (as_json or as_csv):
        from altup.bench.show import print_tables

        print_tables(rows)
        if config.quick and show is None:
            typer.echo(_tell_toys(rows))
    if plot is not None:
        from altup.bench.show import draw

        draw(rows, plot)
    if any(row.status == "disagrees" and row.kind == "ours" for row in rows):
        raise typer.Exit(1)


def _tell_toys(rows: list[BenchRow]) -> str:
    """What a quick run is good for."""
    from altup.bench.show import NEED_GPU

    text = "Toy sizes: they show that everything runs and agrees with its definition, not how fast it is."
    left_out = sum(row.note in NEED_GPU for row in rows)
    if left_out:
        text += f"\nNo GPU here: compiled code and Triton kernels, {left_out} providers, were not measured."
    return text + "\nSpeed: `altup bench` on a GPU, or what was measured on one: docs/benchmarks.md."


def _stored(config: BenchConfig, path: Path, printed: TextIO | None, as_json: bool) -> list[BenchRow]:
    from altup.bench.rows import Sheet, read_rows

    stored = [(row, machine) for row, machine in read_rows(path) if row.case in config.cases]
    if not stored:
        raise UserError(f"--show {path}: holds no rows of {', '.join(config.cases)}")
    if printed is not None:
        sheet = Sheet(printed, stored[0][1], as_json)
        for row, machine in stored:
            sheet.add(row, machine)
    return [row for row, _ in stored]


def _measure(config: BenchConfig, out: Path | None, printed: TextIO | None, as_json: bool) -> list[BenchRow]:
    if config.cold:  # set before torch is imported, which reads it then
        fresh = tempfile.mkdtemp(prefix="altup-bench-")
        os.environ.update(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1", TRITON_CACHE_DIR=fresh)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from altup.bench.rows import Sheet
    from altup.bench.runner import measure

    def open_sheets(machine: Machine) -> list[Sheet]:
        return [Sheet(to, machine, as_json) for to in (out, printed) if to is not None]

    return measure(config, open_sheets, say=lambda text: typer.echo(text, err=True))
