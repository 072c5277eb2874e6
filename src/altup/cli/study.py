"""`altup study`: the paper's tables and figures as studies that can be run at any scale."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.studies.run import StudyOutcome, StudyRun

app = typer.Typer(
    help="The paper's tables and figures as studies, at any scale.", no_args_is_help=True, add_completion=False
)
OUT = Path("studies")

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="STUDY…", help="Names (`altup study list`), or YAML files of your own."),
]
Results = Annotated[
    list[Path] | None,
    typer.Option(
        "--results", help="Folder with results. Repeat it to add up several.", show_default="studies/results"
    ),
]
ScaleName = Annotated[
    str | None,
    typer.Option(
        "--scale", help="Which of the scales in the results.", show_default="of each study the one most run"
    ),
]

KnownResults = Annotated[
    Path | None,
    typer.Option(
        help="Folder of results: what it holds is not run again, what is found is added.",
        show_default="OUT/results",
    ),
]
RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="A setting of every run: --set steps=5000, --set finetune.steps=100.", show_default=False
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        help="Concurrent runs, assigned to GPUs round-robin; those of one GPU train one after the other.",
        show_default="one a GPU",
    ),
]


@app.command("list")
def list_studies() -> None:
    """Show the studies: what each asks, and what it runs."""
    from rich.table import Table

    from altup.core.terminal import Console
    from altup.studies.scale import SCALES, count_runs, find_scale
    from altup.studies.study import shipped

    table = Table(show_lines=True)
    table.add_column("study", no_wrap=True)
    table.add_column("question")
    table.add_column("runs:\n" + ",\n".join(SCALES), justify="right")
    scales = [find_scale(name) for name in SCALES]
    for study in shipped().values():
        counts = [str(count_runs(study, scale) * len(scale.seeds)) for scale in scales]
        table.add_row(study.name, study.question, ", ".join(counts))
    console = Console()
    console.print(table)
    for scale in scales:
        console.print(f"[bold]{scale.name}[/bold]: {scale.about}", highlight=False)
    console.print(
        "Models that several studies share are run once. Sweeps are not counted here, but by --dry-run. Run one: "
        "altup study run varying-k --scale smoke"
    )


@app.command("run")
def run_studies(
    names: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="Every shipped study.")] = False,
    scale: Annotated[str, typer.Option(help="smoke, mini, paper, or a YAML file (like: mini).")] = "smoke",
    data: Annotated[
        str | None, typer.Option(help="Folder made by `altup prepare`; smoke brings its own.", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Folder with SUITE/TASK/SPLIT.jsonl files, for fine-tuning.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results.")] = OUT,
    results: KnownResults = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0,1.", show_default="the scale's")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A row by its label. Repeat it.", show_default=False)
    ] = None,
    set_: RunSettings = None,
    jobs: Jobs = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Train the --jobs of a GPU at once, not in turns; only under MPS.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which what runs saves and stops.", show_default="none")
    ] = None,
    speed: Annotated[bool, typer.Option(help="Compare speeds, which takes the machine for itself.")] = True,
    finetune: Annotated[bool, typer.Option(help="Fine-tune where the studies ask for it.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run and what it costs.")] = False,
    device: Annotated[
        str | None, typer.Option(help="GPU that --dry-run counts with, such as H200.", show_default="this machine")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a device hour, for --dry-run.", show_default="none")
    ] = None,
) -> None:
    """Run studies. Stop with Ctrl-C and run the same command again to resume; what is finished is not repeated."""
    from altup.core.console import outlive_stdout
    from altup.core.errors import UserError
    from altup.core.interrupts import raise_on_interrupt
    from altup.core.schema import parse_pairs
    from altup.studies.progress import watch_jobs
    from altup.studies.run import StudyRun
    from altup.studies.scale import find_scale, read_seeds, with_settings
    from altup.studies.study import find_study, shipped

    if not dry_run:
        outlive_stdout()
    if everything == bool(names):
        raise UserError("name studies (`altup study list` shows them), or give --all")
    _check_numbers(jobs, time_limit, price)
    chosen = list(shipped().values()) if everything else [find_study(name) for name in names or ()]
    at = with_settings(find_scale(scale), parse_pairs("--set", set_ or []))
    options = {"--scale": scale, "--set": set_, "--data": data, "--tasks": tasks, "--seeds": seeds, "--jobs": jobs}
    studies = StudyRun(
        chosen, at, out, results or out / "results", at.seeds if seeds is None else read_seeds(seeds),
        data, tasks, tuple(only or ()), finetune, speed, _command(names, options, speed, finetune), dry=dry_run,
    )  # fmt: skip
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="altup-dry-run-") as scratch:
            studies.scratch = Path(scratch)
            _show_plan(studies, device, price)
        return
    raise_on_interrupt()
    with watch_jobs(out) as watch:
        outcome = studies.run(_say, jobs, time_limit, at_once, watch=watch)
    _show_outcome(studies, outcome)


def _check_numbers(jobs: int | None, time_limit: float | None, price: float | None) -> None:
    from altup.core.errors import UserError, check_range, check_whole

    if jobs is not None:
        check_whole("--jobs", jobs, 1)
    if time_limit is not None and not time_limit > 0:
        raise UserError(f"--time-limit {time_limit:g} makes no sense; give a number of seconds above 0")
    if price is not None:
        check_range("--price", price, 0, float("inf"))


def _command(names: list[str] | None, options: dict[str, Any], speed: bool, finetune: bool) -> str:
    """What a user would type to measure the same again."""
    words = ["altup", "study", "run", *(names or ["--all"])]
    for flag, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            words += [flag, str(value)] if value is not None else []
    return shlex.join([*words, *["--no-speed"] * (not speed), *["--no-finetune"] * (not finetune)])


def _show_outcome(studies: StudyRun, outcome: StudyOutcome) -> None:
    """How it went; the exit code says it too."""
    from altup.core.text import number_of

    _say(f"{number_of(outcome.finished, 'job')} finished now; {outcome.results} results are in {studies.results}")
    if outcome.remaining:
        _say(f"{number_of(len(outcome.remaining), 'job')} remaining; run the same command again to resume")
    if outcome.stopped:
        raise typer.Exit(STOPPED)
    if outcome.failed:
        _say(f"{number_of(len(outcome.failed), 'job')} failed; their logs are in {studies.out / 'logs'}")
        raise typer.Exit(1)
    if outcome.results:
        _say(f"Look at them: altup study report --results {studies.results} --out report.html")


def _show_plan(studies: StudyRun, device: str | None, price: float | None) -> None:
    """Every job with its state, steps and estimated time, and the sum."""
    from rich.table import Table

    from altup.core.terminal import Console
    from altup.core.text import duration
    from altup.studies.jobs import NOT_PREPARED
    from altup.studies.run import Device

    on = Device.find(device) if device else studies.device
    lines = studies.forecast(on)
    table = Table("run", "state")
    for name in ("steps", "about"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        steps, seconds = f"{line.steps:,}" if line.steps else "", duration(line.seconds) if line.seconds else ""
        table.add_row(line.title, line.state, steps, seconds)
    total, count = sum(line.seconds for line in lines), sum(line.runs for line in lines)
    console = Console()
    console.print(table)
    if studies.study_data.identity == NOT_PREPARED:
        _say("Without --data: counted with T5's vocabulary of 32,128.")
    cost = f", {price * total / 3600:,.2f} at {price:g} an hour" if price is not None else ""
    console.print(
        f"{count} jobs; about {duration(total)} of one device ({on.name}){cost}. "
        "Times are rough: from measured speeds where there are any, else from FLOPs.", highlight=False,
    )  # fmt: skip


@app.command("work", hidden=True)
def work_one(
    job: Annotated[Path, typer.Argument(help="A job as JSON.")],
    out: Annotated[Path, typer.Option(help="The studies folder.")],
    results: Annotated[Path, typer.Option(help="The results folder.")],
    alone: Annotated[bool, typer.Option("--alone", help="Nothing else runs on the device.")] = False,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", help="Save and stop then.")] = False,
) -> None:
    """Do one job in this process; `run` starts these."""
    from altup.core.console import outlive_stdout
    from altup.studies.jobs import read_job
    from altup.studies.work import do_job
    from altup.training.preemption import stop_when_closed

    outlive_stdout()
    if until_stdin_ends:
        stop_when_closed(0)
    if not do_job(read_job(job), out, results, alone):
        raise typer.Exit(STOPPED)


@app.command("report")
def write_report(
    names: Names = None,
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    results: Results = None,
    scale: ScaleName = None,
    plots: Annotated[bool, typer.Option(help="Also every chart as SVG, in a folder beside it.")] = True,
) -> None:
    """Write one HTML file that works offline: every table of the paper (or the studies named) with the results."""
    from altup.studies.report import StudyReport

    StudyReport(_folders(results), scale, names or ()).write(out, plots)
    typer.echo(f"{out}" + (f", plots in {out.with_name(out.stem + '-plots')}" if plots else ""))


@app.command("table")
def print_tables(
    names: Names = None,
    results: Results = None,
    scale: ScaleName = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="table, markdown or csv.", show_default="table in a terminal, markdown elsewhere"
        ),
    ] = None,
) -> None:
    """Print the tables of studies (all, unless named): the paper's numbers, ours, the outcome of its claims.

    In a terminal a table shows the models that were run; Markdown and CSV have every row of the paper's too. CSV
    is the study's table alone, without speedups, sweeps and claims.
    """
    from altup.core.errors import check_choice
    from altup.core.tables import table_console
    from altup.studies.report import StudyReport
    from altup.studies.tables import FORMATS

    form = form or ("table" if sys.stdout.isatty() else "markdown")
    check_choice("format", form, FORMATS)
    report = StudyReport(_folders(results), scale, names or ())
    for problem in report.problems():
        _say(problem)
    report.print(table_console(), form)
    if report.not_run:
        absent = [name for name in names or () if name not in {s.name for s, _ in report.run}]
        again = shlex.join(["altup", "study", "run", *(absent or (s.name for s in report.not_run))])
        _say(f"not run: {', '.join(s.name for s in report.not_run)}; run what is missing: {again}")


def _folders(results: list[Path] | None) -> list[Path]:
    from altup.core.errors import UserError

    found = results or [OUT / "results"]
    for folder in found:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder, so there are no results; `altup study run` makes them")
    return found


@app.command("merge")
def merge_results(
    source: Annotated[Path, typer.Argument(help="A results folder, such as studies/results.")],
    target: Annotated[Path, typer.Option("--into", help="The folder that collects them.")],
) -> None:
    """Add the results of one folder to another, so that runs of several machines and days make one report."""
    from altup.studies.results import merge

    found, records = merge(source, target)
    typer.echo(f"{found} results and {records} run records are now in {target}")


def _say(text: str) -> None:
    typer.echo(text, err=True)
