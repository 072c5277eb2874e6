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
    from altup.core.terminal import Console
    from altup.studies.demo import Demo

SHORT = 50  # steps: less is over before another process has started


def command(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")] = Path("altup-demo"),
    steps: Annotated[int | None, typer.Option(help="Updates of each model.", show_default="1400")] = None,
    seed: Annotated[int, typer.Option(help="First seed of weights and data order, the same for all three.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each model, with consecutive seeds.", show_default="2")
    ] = None,
) -> None:
    """See AltUp at work: no network, no GPU, no arguments, a few minutes.

    Trains three small language models (dense, AltUp, Recycled-AltUp) on the English that comes with Python, twice
    each, shows what they write and how they compare, and writes a report. Stop it with Ctrl-C and run it again to
    resume; what is finished is not repeated.
    """
    # A second thread would only wait: models this small are trained side by side instead.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from altup.core.console import outlive_stdout
    from altup.core.errors import UserError
    from altup.core.hardware import usable_cores
    from altup.core.interrupts import raise_on_interrupt
    from altup.studies.demo import SEEDS, STEPS, Demo
    from altup.studies.progress import watch_jobs

    outlive_stdout()
    demo = Demo(out, STEPS if steps is None else steps, seed, SEEDS if seeds is None else seeds)
    demo.refuse_foreign()
    begun = time.monotonic()
    raise_on_interrupt()
    try:
        say(f"preparing the English that comes with Python in {demo.data}")
        demo.prepare()
        with watch_jobs(demo.out) as watch:
            is_short = demo.steps <= SHORT
            outcome = demo.study.run(
                say, jobs=1 if is_short else min(usable_cores(), 8), isolated=not is_short, watch=watch
            )
        stopped = outcome.stopped
        if outcome.failed:
            raise UserError(f"{outcome.failed[0]} failed; see {demo.out / 'logs'}")
        if not stopped:
            _show(demo, begun)
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        say("stopped; everything finished so far is kept. Run the same command again to resume.")
        raise typer.Exit(STOPPED)


def _show(demo: Demo, begun: float) -> None:
    from altup.core.terminal import Console
    from altup.core.text import duration

    say("")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    _show_continuations(console, demo)
    demo.results.print(console)
    demo.results.write(demo.report, plots=False, continued=demo.continuations)
    say(f"{duration(time.monotonic() - begun)} in all.")
    typer.echo(
        f"\nReport with the curves: {demo.report}\nNext, with the models that you have, and on your own text:"
    )
    for line in demo.next_steps():
        typer.echo(f"  {line}")


def _show_continuations(console: Console, demo: Demo) -> None:
    """The sentences one below the other, each with the text's end and the models' ends."""
    from rich.text import Text

    console.print("Sentences that no model has seen, and how the models would end them:")
    for one in demo.continuations:
        width = max(map(len, one.by_model))
        console.print(Text(f"\n{one.begin} …", style="bold"))
        console.print(Text.assemble((f"  {'the text':{width}}  ", "dim"), one.truth))
        for label, text in one.by_model.items():
            shown = (text, "green") if text else ("(nothing)", "red")
            console.print(Text.assemble((f"  {label:{width}}  ", "dim"), shown))
    console.print()


def say(text: str) -> None:
    typer.echo(text, err=True)
