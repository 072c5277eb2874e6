"""`altup demo`: dense, AltUp and Recycled-AltUp side by side on this machine, in a few minutes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.studies.demo import Continuation, Demo

SHORT = 50  # steps: less is over before another process has started


def command(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")] = Path("altup-demo"),
    steps: Annotated[int | None, typer.Option(help="Updates of each model.", show_default="1400")] = None,
    seed: Annotated[int, typer.Option(help="First seed of weights and data order, the same for all three.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each model, with seeds one after the other.", show_default="2")
    ] = None,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
) -> None:
    """See AltUp at work: no network, no GPU, no arguments, a few minutes.

    Trains three small language models (dense, AltUp, Recycled-AltUp) on the English that comes with Python, twice
    each, shows what they write and how they compare, and writes a report. Stop it with Ctrl-C and run it again to
    go on; what is finished is not repeated.
    """
    # A second thread would only wait: models this small are trained side by side instead, a process for each seed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from altup.core.console import outlive_stdout
    from altup.core.interrupts import raise_on_interrupt
    from altup.studies.demo import SEEDS, STEPS, Demo

    outlive_stdout()
    demo = Demo(out, STEPS if steps is None else steps, seed, SEEDS if seeds is None else seeds)
    if until_stdin_ends:
        _train_for_another(demo)
        return
    demo.refuse_foreign()
    begun = time.monotonic()
    raise_on_interrupt()
    try:
        finished = _train(demo)
        if finished:
            _show(demo, begun)
    except KeyboardInterrupt:
        finished = False
    if not finished:
        say("stopped; everything finished so far is kept. Run the same command again to go on.")
        raise typer.Exit(STOPPED)


def _train_for_another(demo: Demo) -> None:
    """The part of a process that `_train_side_by_side` has started; it saves and stops when that one ends."""
    from altup.training.preemption import stop_when_closed

    stop_when_closed(0)
    if not _train_here(demo):
        raise typer.Exit(STOPPED)


def _train(demo: Demo) -> bool:
    """Data and all runs; False if a signal asked to stop."""
    from altup.core.hardware import usable_cores
    from altup.studies.demo import MODELS

    say(f"preparing the English that comes with Python in {demo.data}")
    demo.prepare(lambda stage, fraction, documents, tokens: None)
    left = [seed for seed in demo.seeds if not all(demo.is_finished(method, seed) for method in MODELS)]
    if len(left) > 1 and demo.steps > SHORT and usable_cores() > 1:
        return _train_side_by_side(demo, left)
    return _train_here(demo)


def _train_here(demo: Demo) -> bool:
    from altup.studies.demo import MODELS

    for method, name in MODELS.items():
        for seed in demo.seeds:
            reused = demo.is_finished(method, seed)
            say(f"\n{name}, seed {seed}" + (": finished before, reused" if reused else ""))
            if not demo.train(method, seed).finished:
                return False
    return True


def _train_side_by_side(demo: Demo, seeds: list[int]) -> bool:
    """The seeds at once, with a bar for each in a terminal, and a line an evaluation elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from altup.core.terminal import Console
    from altup.studies.demo import MODELS
    from altup.studies.demo_processes import train_seeds

    told = " and ".join(map(str, seeds))
    say(f"training {', '.join(MODELS.values())}, {demo.steps:,} steps each; seeds {told} at once")
    live = sys.stderr.isatty()
    names = list(MODELS)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), disable=not live) as bars:
        tasks = {seed: bars.add_task(f"seed {seed} · starting", total=len(MODELS) * demo.steps) for seed in seeds}

        def watch(method: str, seed: int, record: dict[str, Any]) -> None:
            told = f"seed {seed} · {MODELS[method]} · step {record['step']:,}"
            if record.get("loss") is not None:
                told += f" · {'held-out ' if record['split'] == 'validation' else ''}loss {record['loss']:.3f}"
            bars.update(tasks[seed], description=told, completed=names.index(method) * demo.steps + record["step"])
            if not live and record["split"] == "validation":
                say(told)

        return train_seeds(demo, seeds, watch)


def _show(demo: Demo, begun: float) -> None:
    from altup.core.tables import print_table
    from altup.core.terminal import Console
    from altup.core.text import duration
    from altup.studies.demo import MODELS
    from altup.studies.demo_report import comparison, next_steps, verdict, write_report

    say("")
    speeds, records, continued = demo.compare_speed(say), demo.records(), demo.continuations()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    _show_continuations(console, continued, MODELS)
    print_table(console, ["", *MODELS.values()], comparison(records, speeds))
    for sentence in verdict(records, speeds):
        console.print(sentence)
    report = write_report(demo, records, speeds, continued)
    say(f"{duration(time.monotonic() - begun)} in all.")
    typer.echo(f"\nReport with the curves: {report}\nNext, with the models that you have, and on your own text:")
    for line in next_steps(demo):
        typer.echo(f"  {line}")


def _show_continuations(console: Any, continued: list[Continuation], names: dict[str, str]) -> None:
    """The sentences one below the other, each with the text's own end and the models' ends."""
    from rich.text import Text

    console.print("Sentences that no model has seen, and how the models would end them:")
    width = max(map(len, names.values()))
    for one in continued:
        console.print(Text(f"\n{one.begin} …", style="bold"))
        console.print(Text.assemble((f"  {'the text':{width}}  ", "dim"), one.truth))
        for method, text in one.by_method.items():
            shown = (text, "green") if text else ("(nothing)", "red")
            console.print(Text.assemble((f"  {names[method]:{width}}  ", "dim"), shown))
    console.print()


def say(text: str) -> None:
    typer.echo(text, err=True)
