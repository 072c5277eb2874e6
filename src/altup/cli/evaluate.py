"""`altup evaluate`: scores of a model on tasks and suites."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from altup.evaluation.scores import TaskScore

Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="A task (`altup tasks list`), or your own .jsonl file or folder. Repeat it."),
]
Suites = Annotated[list[str] | None, typer.Option("--suite", help="glue or super_glue. Repeat it.")]
Data = Annotated[
    str | None,
    typer.Option(help="Folder with SUITE/TASK/SPLIT.jsonl files (.gz, .zst).", show_default="the hub"),
]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or a model on the hub.")],
    task: Tasks = None,
    suite: Suites = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions and scores.", show_default="in the run")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples a split.", show_default="all")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples decoded together.")] = 128,
    precision: Annotated[
        str | None, typer.Option(help="bf16 or fp32.", show_default="bf16 on GPUs, else fp32")
    ] = None,
    on_error: Annotated[str, typer.Option(help="Bad records: stop, or skip and count them.")] = "stop",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Decode the held-out examples greedily, score them, and keep every prediction as JSON lines."""
    from altup.data.faults import Faults, counted
    from altup.data.tasks import find_tasks
    from altup.data.tasks.registry import check_suite
    from altup.data.tasks.sources import open_tasks
    from altup.errors import UserError, check_choice, check_whole

    check_whole("batch_size", batch_size, 1)
    if limit is not None:
        check_whole("limit", limit, 1)
    if precision is not None:
        check_choice("precision", precision, ("bf16", "fp32"))
    tasks = find_tasks([*map(check_suite, suite or ()), *(task or ())])
    named = {found.name for found in find_tasks(task)} if task else set()
    source, faults = open_tasks(data), Faults(on_error)

    from altup.evaluation.evaluate import evaluate_tasks, has_held_out, load_held_out, summarise, write_scores

    # A suite may be there in part, which its score then says; a task that was asked for by name must be there.
    present = [found for found in tasks if found.name in named or has_held_out(found, source)]
    if not present:
        raise UserError(f"none of the suite's tasks is in {data}; check --data")
    place, name, folder = _place(model)
    held_out = load_held_out(present, source, faults, limit)
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)  # or fail before hours of decoding
    network, tokenizer, autocast = _load(place, precision)

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("decoding", total=sum(map(len, held_out)))
        scores = evaluate_tasks(
            network,
            tokenizer,
            held_out,
            out,
            batch_size=batch_size,
            autocast=autocast,
            progress=lambda done: bar.advance(line, done),
        )
    summary = {**summarise(scores, name), "skipped": faults.state()}
    path = write_scores(out, summary)
    if as_json:
        import json

        typer.echo(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    Console().print(score_table(scores, name))
    if left_out := counted(faults):
        typer.secho(f"left out: {left_out}", err=True, fg="yellow")
    typer.echo(f"predictions and scores are in {path.parent}")


def score_table(scores: list[TaskScore], title: str) -> Any:
    """A row a task and a row a suite; a star marks scores over a part of the data, explained below."""
    from rich.table import Table

    from altup.evaluation.scores import score_suites

    table = Table("task", "metrics", "examples", "score", title=title, title_justify="left")
    notes = []
    for score in scores:
        metrics = ", ".join(f"{name} {value:.2f}" for name, value in score.metrics.items())
        mark = "*" if score.partial else ""
        table.add_row(score.task, metrics, f"{sum(score.examples.values()):,}", f"{score.score:.2f}{mark}")
        notes += [f"{score.task}: {part}" for part in score.missing]
    suites = score_suites(scores)
    if suites:
        table.add_section()
    for suite in suites:
        mark = "*" if suite.partial else ""
        table.add_row(suite.suite, f"mean of {len(suite.tasks)} tasks", "", f"{suite.score:.2f}{mark}")
        notes += [part for part in suite.missing if part not in notes]
    if notes:
        table.caption = "* partial data: " + "; ".join(notes)
    return table


def _place(model: str) -> tuple[str, str, Path]:
    """Where the model lies, what to call it, and where its scores go.

    A checkpoint is sealed with hashes, so nothing is written into a model's folder itself.
    """
    from altup.finetuning.finetune import starting_point

    place, path = Path(starting_point(model)), Path(model).expanduser()
    if not path.exists():
        return model, model, Path("evaluation") / path.name
    if place == path:
        return str(place), str(place), Path("evaluation") / path.resolve().name
    return str(place), str(place), path / "evaluation" / place.name


def _load(place: str, precision: str | None) -> tuple[Any, Any, Any]:
    """Model, tokenizer and the context to run it in."""
    from contextlib import nullcontext

    import torch
    from transformers.utils import logging

    import altup.models  # noqa: F401  registers our models with the Auto classes
    from altup.evaluation.decoding import round_weights
    from altup.finetuning.finetune import load_tokenizer
    from altup.models.upcycling import T5S, load_pretrained

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_pretrained(place, only=T5S).to(device).eval()  # type: ignore[arg-type]
    tokenizer = load_tokenizer(place)
    if (precision or ("bf16" if device == "cuda" else "fp32")) == "fp32":
        return network, tokenizer, nullcontext
    round_weights(network, torch.bfloat16)
    return network, tokenizer, lambda: torch.autocast(device, dtype=torch.bfloat16)
