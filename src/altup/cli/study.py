"""`altup study`: the paper's tables and figures as studies that can be run at any scale."""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.studies.report import StudyReport
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
    typer.Option("--scale", help="Which of the scales in the results.", show_default="the one most run"),
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
Minutes = Annotated[
    float | None,
    typer.Option(help="Minutes of each equal-time run.", show_default="what AltUp takes for the scale's steps"),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        help="Runs at a time, over the GPUs in turn; those on one GPU start at once and train in turn.",
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
    scale: Annotated[str, typer.Option(help="smoke, long, mini, paper, or a YAML file (like: long).")] = "smoke",
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
    minutes: Minutes = None,
    jobs: Jobs = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Train the --jobs of a GPU at once, not in turns; only under MPS.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which what runs saves and stops.", show_default="none")
    ] = None,
    speed: Annotated[bool, typer.Option(help="Compare speeds, which takes the machine for itself.")] = True,
    finetune: Annotated[bool, typer.Option(help="Fine-tune where the studies ask for it.")] = True,
    repeat_collapsed: Annotated[
        bool,
        typer.Option("--repeat-collapsed", help="Run seeds whose run collapsed once more, with spikes skipped."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run and what it costs.")] = False,
    device: Annotated[
        str | None, typer.Option(help="GPU that --dry-run counts with, such as H200.", show_default="this machine")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of a device hour, for --dry-run.", show_default="none")
    ] = None,
) -> None:
    """Run studies. Stop with Ctrl-C and run the same command again to go on; what is finished is not repeated."""
    from altup.core.console import outlive_stdout
    from altup.core.errors import UserError
    from altup.core.interrupts import raise_on_interrupt
    from altup.core.schema import parse_pairs
    from altup.studies.run import StudyRun
    from altup.studies.scale import find_scale, read_seeds, with_settings
    from altup.studies.study import find_study, shipped

    if not dry_run:
        outlive_stdout()
    if everything == bool(names):
        raise UserError("name studies (`altup study list` shows them), or give --all")
    _check_numbers(jobs, time_limit, price)
    chosen = list(shipped().values()) if everything else [find_study(name) for name in names or ()]
    at = with_settings(find_scale(scale), parse_pairs("--set", set_ or []), minutes)
    options = {"--scale": scale, "--set": set_, "--data": data, "--tasks": tasks, "--seeds": seeds}
    command = _command(names, {**options, "--minutes": minutes, "--jobs": jobs}, speed, finetune)
    command += " --repeat-collapsed" if repeat_collapsed else ""
    studies = StudyRun(
        chosen, at, out, results or out / "results", at.seeds if seeds is None else read_seeds(seeds),
        data, tasks, tuple(only or ()), finetune, speed, command, repeat_collapsed, dry=dry_run,
    )  # fmt: skip
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="altup-dry-run-") as scratch:
            studies.scratch = Path(scratch)
            _show_plan(studies, device, price)
    else:
        raise_on_interrupt()
        _tell(studies, studies.run(_say, jobs, time_limit, at_once))


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


def _tell(studies: StudyRun, outcome: StudyOutcome) -> None:
    """How it went; the exit code says it too."""
    from altup.core.text import number_of

    _say(f"{number_of(outcome.finished, 'job')} finished now; {outcome.results} results are in {studies.results}")
    if outcome.left:
        _say(f"{number_of(len(outcome.left), 'job')} left; run the same command again to go on")
    if outcome.stopped:
        raise typer.Exit(STOPPED)
    if outcome.failed:
        _say(f"{number_of(len(outcome.failed), 'job')} failed; their logs are in {studies.out / 'logs'}")
        raise typer.Exit(1)
    if outcome.results:
        _say(f"Look at them: altup study report --results {studies.results} --out report.html")
    elif studies.scale.tune:
        _say(f"Look at the sweeps: altup study report --results {studies.results} --out report.html")


def _show_plan(studies: StudyRun, device: str | None, price: float | None) -> None:
    """Every job with its state, steps and estimated time, and the sum."""
    from rich.table import Table

    from altup.core.terminal import Console
    from altup.core.text import duration
    from altup.studies.forecast import forecast
    from altup.studies.jobs import NOT_PREPARED
    from altup.studies.run import find_device

    on = find_device(device) if device else studies.device
    lines = forecast(studies, studies.plan(), on)
    table = Table("run", "state")
    for name in ("steps", "about"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.title, line.state, line.steps, duration(line.seconds) if line.seconds else "")
    total, count = sum(line.seconds for line in lines), sum(line.runs for line in lines)
    least = sum(line.seconds if line.least is None else line.least for line in lines)
    console = Console()
    console.print(table)
    if studies.study_data.identity == NOT_PREPARED:
        _say("Without --data: counted with T5's vocabulary of 32,128.")
    cost = f", {price * total / 3600:,.2f} at {price:g} an hour" if price is not None else ""
    cost += f", {duration(least)} if every sweep ends where it begins" if least < total else ""
    console.print(
        f"{count} jobs{' at most' if count > len(lines) else ''}; "
        f"about {duration(total)} of one device ({on.name}){cost}. "
        "Times are rough: from measured speeds where there are any, else from FLOPs.", highlight=False,
    )  # fmt: skip


@app.command("work", hidden=True)
def work_one(
    job: Annotated[Path, typer.Argument(help="A job as JSON.")],
    out: Annotated[Path, typer.Option(help="The studies folder.")],
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", help="Save and stop then.")] = False,
) -> None:
    """Do one job in this process; `run` starts these."""
    from altup.core.console import outlive_stdout
    from altup.studies.jobs import read_job
    from altup.studies.queue import do_job
    from altup.training.preemption import stop_when_closed

    outlive_stdout()
    if until_stdin_ends:
        stop_when_closed(0)
    finished = do_job(read_job(job), out)
    if not finished:
        raise typer.Exit(STOPPED)


@app.command("report")
def write_report(
    names: Names = None,
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
    results: Results = None,
    scale: ScaleName = None,
    plots: Annotated[bool, typer.Option(help="Also every plot as SVG and PNG, in a folder beside it.")] = True,
) -> None:
    """Write one HTML file that works offline: every table of the paper (or the studies named) with the results."""
    from altup.studies.report import StudyReport

    report = StudyReport(_folders(results), scale, names or ())
    _warn_of_lost_records(report)
    report.write(out, plots)
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

    Studies with a frontier have speedups at equal score below the table, but not in CSV.

    A table shows the models that were run; Markdown and CSV have every row and column of the paper's too.
    """
    from altup.core.errors import check_choice
    from altup.core.tables import table_console
    from altup.studies.report import StudyReport
    from altup.studies.sweep_figures import text_sweeps
    from altup.studies.tables import FORMATS, text_claims, text_speedups, text_table
    from altup.studies.terminal import print_study

    form = form or ("table" if sys.stdout.isatty() else "markdown")
    check_choice("format", form, FORMATS)
    report = StudyReport(_folders(results), scale, names or ())
    _warn_of_lost_records(report)
    if form != "csv" and report.begun:
        typer.echo(text_sweeps(report.begun))
        _say("models without results yet, only sweeps: the same `altup study run` goes on")
    if not report.results:
        return
    absent = []
    for name, study in zip(names or [study.name for study in report.studies], report.studies, strict=True):
        if not report.was_run(study):
            absent.append(name)
        if not report.stats.sizes_of(study) and (form == "table" or not study.table):
            continue  # nothing of ours, and the paper's numbers alone are worth no table in a terminal
        if form == "table":
            print_study(table_console(), study, report.stats, report.sweeps(study))
            continue
        typer.echo(text_table(study, report.stats, form))
        if form == "markdown" and (told := text_speedups(study, report.stats)):
            typer.echo(told)
        if form == "markdown" and study.expect:
            typer.echo(text_claims(study, report.stats))
        if form == "markdown" and (told := text_sweeps(report.sweeps(study))):
            typer.echo(told)
    if absent:
        again = shlex.join(["altup", "study", "run", *absent, *_scale_options(report)])
        _say(f"not run: {', '.join(absent)}; run what is missing: {again}")


def _scale_options(report: StudyReport) -> list[str]:
    """How the scale of the results was asked for: a file has a path that its name does not tell."""
    scale = report.stats.scale
    words = next((shlex.split(result.command) for result in report.results if result.scale == scale), [])
    options = ("--scale", "--set", "--minutes")
    found = [word for name, value in itertools.pairwise(words) if name in options for word in (name, value)]
    return found if "--scale" in found else ["--scale", scale]


def _warn_of_lost_records(report: StudyReport) -> None:
    from altup.core.text import number_of

    if lost := report.runs_without_record():
        files = ", ".join([f"runs/{key}.json" for key in lost[:3]] + ["…"] * (len(lost) > 3))
        _say(
            f"warning: no record of {number_of(len(lost), 'run')} ({files}), so that curves lack them, and "
            "studies that share their models"
        )


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
    from altup.core.text import number_of
    from altup.studies.results import merge, read_sweeps

    found, records = merge(source, target)
    sweeps = number_of(len(read_sweeps(source)), "sweep")
    typer.echo(f"{found} results, {records} run records and {sweeps} are now in {target}")


def _say(text: str) -> None:
    typer.echo(text, err=True)
