"""`altup evaluate`: scores of a model on tasks and suites, or its predictions for records without labels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from altup.cli.options import with_settings
from altup.core.text import number_of
from altup.evaluation.config import EvaluateConfig

if TYPE_CHECKING:
    from altup.evaluation.predict import Predictions
    from altup.evaluation.scores import TaskScore

Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="A task (`altup tasks list`), or your own .jsonl, folder or .py file. Repeat it."),
]


@with_settings(EvaluateConfig)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder, or a model on the hub.")],
    task: Tasks = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="glue or super_glue. Repeat it.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for predictions and scores. Default: in the run.", show_default=False),
    ] = None,
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="Predict records, which need no labels, and score nothing.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(help="The split that --predict-only reads. Default: test.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    **settings: Any,
) -> None:
    """Answer the held-out examples, score the answers, and keep every prediction as JSON lines.

    Scores of other tasks that the same model has in the folder are kept. With --predict-only nothing is scored, so
    a test set's records, which have no labels, can be answered.
    """
    from rich.progress import Progress

    from altup.core.errors import UserError
    from altup.core.terminal import Console
    from altup.evaluation.evaluate import Evaluation, evaluate
    from altup.evaluation.predict import Predictions, predict_model

    if split is not None and not predict_only:
        raise UserError(f"--split {split} goes with --predict-only; scores are those of the held-out split")
    found: Evaluation | Predictions
    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("decoding", total=None)
        options: dict[str, Any] = {
            "out": out,
            "progress": lambda done, total: bar.update(line, completed=done, total=total),
        }
        asked = (model, task or (), suite or (), EvaluateConfig(**settings))
        if predict_only:
            found = predict_model(*asked, split=split or "test", **options)
        else:
            found = evaluate(*asked, say=functools.partial(typer.secho, err=True, fg="yellow"), **options)
    if as_json:
        import json

        typer.echo(json.dumps(found.summary, indent=2, ensure_ascii=False))
        return
    if isinstance(found, Predictions):
        tell_predictions(found)
    else:
        Console().print(score_table(found.scores, found.model))
    if left_out := found.bad_input.summary():
        typer.secho(f"skipped: {left_out}", err=True, fg="yellow")
    typer.echo(f"predictions {'' if predict_only else 'and scores '}are in {found.folder}")


def tell_predictions(found: Predictions) -> None:
    for split in found.splits:
        notes = [f"{split.unknown:,} are no label"] if split.unknown else []
        notes += [f"{split.cut:,} inputs were cut"] if split.cut else []
        text = f" ({'; '.join(notes)})" if notes else ""
        typer.echo(f"{split.task}, {split.split}: {number_of(split.examples, 'prediction')}{text}")


def score_table(scores: list[TaskScore], title: str) -> Any:
    """A row a task and a row a suite; a star marks scores over a part of the data, explained below."""
    from rich.markup import escape
    from rich.table import Table

    from altup.evaluation.scores import score_suites

    table = Table("task", "metrics", title=escape(title), title_justify="left")
    for name in ("examples", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    notes = []
    for score in scores:
        metrics = "\n".join(f"{name} {value:.2f}" for name, value in score.metrics.items())
        mark = "*" if score.partial else ""
        limit = "" if score.limit is None else f"\n(--limit {score.limit})"
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
