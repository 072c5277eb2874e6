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


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or a model on the hub.")],
    task: Tasks = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="glue or super_glue. Repeat it.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Folder with SUITE/TASK/SPLIT.jsonl files (.gz, .zst).", show_default="the hub"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions and scores.", show_default="in the run")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples a split.", show_default="all")] = None,
    inputs_length: Annotated[
        int | None, typer.Option(help="Most tokens of an input.", show_default="as fine-tuned, else 512")
    ] = None,
    targets_length: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", show_default="as fine-tuned, else 128")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples decoded together.")] = 128,
    precision: Annotated[
        str | None, typer.Option(help="bf16 or fp32.", show_default="bf16 on GPUs, else fp32")
    ] = None,
    on_error: Annotated[str, typer.Option(help="Bad records: stop, or skip and count them.")] = "stop",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Decode the held-out examples greedily, score them, and keep every prediction as JSON lines.

    Scores of other tasks that the same model has in the folder are kept.
    """
    from altup.core.errors import UserError, check_choice, check_whole
    from altup.data.bad_input import BadInput
    from altup.data.tasks import find_tasks
    from altup.data.tasks.examples import open_tasks
    from altup.data.tasks.registry import check_suite

    check_whole("batch_size", batch_size, 1)
    given = {"limit": (limit, 1), "inputs_length": (inputs_length, 2), "targets_length": (targets_length, 2)}
    for name, (number, least) in given.items():
        if number is not None:
            check_whole(name, number, least)
    if precision is not None:
        check_choice("precision", precision, ("bf16", "fp32"))
    tasks = find_tasks([*map(check_suite, suite or ()), *(task or ())])
    named = {found.name for found in find_tasks(task)} if task else set()
    source, bad_input = open_tasks(data), BadInput(on_error)

    from altup.evaluation.evaluate import evaluate_tasks, has_held_out, load_held_out, summarise, write_scores
    from altup.evaluation.stored import add_up, identity, other_limits, stored_scores

    # A suite may be there in part, which its score then says; a task that was asked for by name must be there.
    present = [found for found in tasks if found.name in named or has_held_out(found, source)]
    if not present:
        raise UserError(f"none of the suite's tasks is in {data}; check --data")
    place, name, folder = _place(model)
    trained_with = _lengths(Path(place))
    held_out = load_held_out(present, source, bad_input, limit)
    out = out or folder
    out.mkdir(parents=True, exist_ok=True)  # or fail before hours of decoding
    network, tokenizer, autocast = _load(place, precision)
    checkpoint = identity(place, network)
    before, replaced = stored_scores(out, place, checkpoint)
    for note in (replaced, *other_limits(before, limit, [found.name for found in present])):
        if note:
            typer.secho(note, err=True, fg="yellow")

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("decoding", total=sum(map(len, held_out)))
        scores = evaluate_tasks(
            network,
            tokenizer,
            held_out,
            out,
            inputs_length or trained_with["inputs_length"],
            targets_length or trained_with["targets_length"],
            batch_size=batch_size,
            autocast=autocast,
            progress=lambda done: bar.advance(line, done),
        )
    scores = add_up(stored_scores(out, place, checkpoint)[0], scores)  # read anew: decoding takes long
    summary = summarise(scores, name, checkpoint)
    path = write_scores(out, summary)
    if as_json:
        import json

        typer.echo(json.dumps(summary, indent=2, ensure_ascii=False))
        return
    Console().print(score_table(scores, name))
    if left_out := bad_input.summary():
        typer.secho(f"left out: {left_out}", err=True, fg="yellow")
    typer.echo(f"predictions and scores are in {path.parent}")


def score_table(scores: list[TaskScore], title: str) -> Any:
    """A row a task and a row a suite; a star marks scores over a part of the data, explained below."""
    from rich.markup import escape
    from rich.table import Table

    from altup.evaluation.scores import score_suites

    table = Table("task", "metrics", "examples", "score", title=escape(title), title_justify="left")
    notes = []
    for score in scores:
        metrics = ", ".join(f"{name} {value:.2f}" for name, value in score.metrics.items())
        mark = "*" if score.partial else ""
        limit = "" if score.limit is None else f" (--limit {score.limit})"
        examples = f"{sum(score.examples.values()):,}{limit}"
        table.add_row(escape(score.task), metrics, examples, f"{score.score:.2f}{mark}")
        notes += [f"{score.task}: {part}" for part in score.missing]
    suites = score_suites(scores)
    if suites:
        table.add_section()
    for suite in suites:
        mark = "*" if suite.partial else ""
        table.add_row(suite.suite, f"mean of {len(suite.tasks)} tasks", "", f"{suite.score:.2f}{mark}")
        notes += [part for part in suite.missing if part not in notes]
    captions = ["* partial data: " + "; ".join(notes)] if notes else []
    for score in scores:
        for what, number in score.cut.items():
            if number:
                total = f"{number:,} of {sum(score.examples.values()):,} {what}"
                captions.append(f"{score.task}: {total} exceed {score.lengths[what]} tokens and were cut")
    if captions:
        table.caption = escape("\n".join(captions))
    return table


def _place(model: str) -> tuple[str, str, Path]:
    """Where the model lies, what to call it, and where its scores go.

    A checkpoint is sealed with hashes, so nothing is written into a model's folder itself.
    """
    from altup.training.run_folder import find_model

    place, path = Path(find_model(model)), Path(model).expanduser()
    if not path.exists():
        return model, model, Path("evaluation") / path.name
    if place == path:
        return str(place), str(place), Path("evaluation") / _own_name(path.resolve())
    return str(place), str(place), path / "evaluation" / place.name


def _lengths(place: Path) -> dict[str, int]:
    """The lengths that a fine-tuning run used, by the folder of its final model or of a checkpoint."""
    from altup.core.schema import read_yaml
    from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
    from altup.training.run_folder import RunFolder

    run = RunFolder(place.parent.parent if place.parent.name == "checkpoints" else place.parent)
    told = read_yaml(run.config) if run.config.is_file() else {}
    usual = {"inputs_length": INPUTS_LENGTH, "targets_length": TARGETS_LENGTH}
    return {name: told.get(name, length) for name, length in usual.items()} if "tasks" in told else usual


def _own_name(path: Path) -> str:
    """A model folder's name, with that of its run where every run has one of this name."""
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return f"{path.parent.name}-final" if path.name == "final" else path.name


def _load(place: str, precision: str | None) -> tuple[Any, Any, Any]:
    """Model, tokenizer and the context to run it in."""
    from contextlib import nullcontext

    import torch
    from transformers.utils import logging

    import altup.models  # noqa: F401  registers our models with the Auto classes
    from altup.core.cpu import ensure_bf16
    from altup.evaluation.decoding import round_weights
    from altup.finetuning.finetune import check_vocabulary, load_tokenizer
    from altup.models.upcycling import T5S, load_pretrained

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_pretrained(place, only=T5S).to(device).eval()  # type: ignore[arg-type]
    tokenizer = load_tokenizer(place)
    check_vocabulary(network, tokenizer)
    if (precision or ("bf16" if device == "cuda" else "fp32")) == "fp32":
        return network, tokenizer, nullcontext
    ensure_bf16(device)
    round_weights(network, torch.bfloat16)
    return network, tokenizer, lambda: torch.autocast(device, dtype=torch.bfloat16)
