"""`altup demo`: dense, AltUp and Recycled-AltUp side by side on this machine, in a few minutes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.studies.demo import Demo


def command(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")] = Path("altup-demo"),
    steps: Annotated[int | None, typer.Option(help="Updates of each model.", show_default="800")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order, the same for all three.")] = 0,
) -> None:
    """See AltUp at work: no network, no GPU, no arguments, a few minutes.

    Trains three small T5s (dense, AltUp, Recycled-AltUp) on the English that comes with Python, prints how they
    compare and writes a report. Stop it with Ctrl-C and run it again to go on; what is finished is not repeated.
    """
    # On a busy machine, threads that wait by spinning take the time of those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from altup.core.console import outlive_stdout
    from altup.studies.demo import STEPS, Demo

    outlive_stdout()

    demo = Demo(out, STEPS if steps is None else steps, seed)
    demo.refuse_foreign()
    begun = time.monotonic()
    try:
        finished = _train(demo)
        if finished:
            _show(demo)
    except KeyboardInterrupt:
        finished = False
    if not finished:
        say("stopped; everything finished so far is kept. Run the same command again to go on.")
        raise typer.Exit(STOPPED)
    say(f"{time.monotonic() - begun:.0f} seconds in all.")


def _train(demo: Demo) -> bool:
    """Data and the three runs; False if a signal asked to stop."""
    from altup.studies.demo import MODELS

    say(f"preparing the English that comes with Python in {demo.data}")
    demo.prepare(lambda stage, fraction, documents, tokens: None)
    for number, (method, name) in enumerate(MODELS.items(), start=1):
        reused = demo.is_finished(method)
        say(f"\n{number}/{len(MODELS)} {name}" + (": finished before, reused" if reused else ""))
        if not demo.train(method).finished:
            return False
    return True


def _show(demo: Demo) -> None:
    from rich.console import Console
    from rich.table import Table

    from altup.studies.demo import comparison, verdict

    say("")
    speeds, records = demo.compare_speed(say), demo.records()
    rows = comparison(records, speeds)
    table = Table(*(name.strip() for name in rows[0]))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    typer.echo(verdict(records, speeds))
    typer.echo(f"Report with the curves: {demo.write_report(records, speeds)}")


def say(text: str) -> None:
    typer.echo(text, err=True)
