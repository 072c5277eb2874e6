"""`altup tasks`: what there is to fine-tune on, and how it looks as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from altup.core.errors import UserError, named

if TYPE_CHECKING:
    from altup.data.tasks import Task
    from altup.data.tasks.examples import TaskSource

app = typer.Typer(
    help="The fine-tuning tasks, with sizes and real formatted examples.", invoke_without_command=True
)

Data = Annotated[str | None, typer.Option("--data", help="Folder with SUITE/TASK/SPLIT.jsonl files (.gz, .zst).")]


@app.callback()
def _list_if_nothing_else(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_tasks()


@app.command("list")
def list_tasks(
    data: Data = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """All tasks: metrics, lengths, sizes of splits (with --data: found of published), and how inputs look."""
    from altup.data.tasks import SUITES, TASKS
    from altup.data.tasks.examples import open_tasks

    source = open_tasks(data) if data else None
    sizes = {task.name: _sizes(task, source) for task in TASKS.values()}
    if as_json:
        import json

        found = [
            {
                "name": task.name,
                "in_average": task.name in SUITES.get(task.suite, ()),
                "input": task.layout,
                "metrics": task.metrics,
                "labels": task.labels,
                **dict(zip(("inputs_length", "targets_length"), task.lengths(), strict=True)),
                "published": dict(task.published),
                "found": sizes[task.name] if source else None,
            }
            for task in TASKS.values()
        ]
        typer.echo(json.dumps(found, indent=2))
        return

    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from altup.core.terminal import Console

    table = Table("task", "metrics", "lengths", "train", "held out", box=SIMPLE_HEAD)
    for column in table.columns[:3]:
        column.no_wrap = True
    for task in TASKS.values():
        held_out = [split for split in task.published if split != "train"]
        cells = [_size_text(task, "train", sizes[task.name], bool(source))]
        cells.append(" + ".join(_size_text(task, split, sizes[task.name], bool(source)) for split in held_out))
        lengths = " / ".join(map(str, task.lengths()))
        table.add_row(task.name, "\n".join(task.metrics), lengths, *cells)
    console = Console(highlight=False)
    console.print(table)
    inputs = Table("task", "input", box=SIMPLE_HEAD)
    for task in TASKS.values():
        inputs.add_row(task.name, Text(task.layout))
    console.print(inputs)
    console.print(
        "Lengths are the most tokens of input and target. Examples as the model reads them:\n"
        "altup tasks show squad --data DIR"
    )


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(help="A task's name, or your own .jsonl file, folder or .py file (my.py:NAME)."),
    ],
    data: Data = None,
    hub: Annotated[bool, typer.Option("--hub", help="Take the examples from Hugging Face datasets.")] = False,
    split: Annotated[str | None, typer.Option(help="Which split.", show_default="the first held-out one")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="Examples to show.")] = 3,
) -> None:
    """Show a task: its declaration and, with --data or --hub, real examples as the model sees them."""
    from rich.text import Text

    from altup.core.errors import check_whole
    from altup.core.terminal import Console
    from altup.data.bad_input import BadInput
    from altup.data.tasks import find_task
    from altup.data.tasks.examples import load_examples, open_tasks

    check_whole("count", count, 1)
    task = find_task(name)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text.assemble((task.name, "bold"), f": {task.description}"))
    if task.layout:
        console.print(Text(f"input: {task.layout}"))
    console.print(f"metrics: {', '.join(task.metrics)}; lengths: {' / '.join(map(str, task.lengths()))} tokens")
    if task.labels:
        console.print(f"targets: {', '.join(task.labels)}")
    if data is None and not task.files and not hub:
        source = ", config ".join(filter(None, task.hub)) if task.hub else "none on the hub"
        console.print(f"Hugging Face dataset: {source}. Give --data DIR or --hub for examples.")
        return
    split = task.held_out[0] if split is None else split
    if split != "train" and split not in task.held_out:
        raise UserError(f"{named('split', split)}; {task.name} has train and {', '.join(task.held_out)}")
    bad_input = BadInput("skip")
    for example in load_examples(task, split, open_tasks(data), bad_input, count):
        console.print()
        console.print(Text.assemble(("input   ", "dim"), example.input))
        console.print(Text.assemble(("target  ", "dim"), (example.target, "bold green")))
        if example.references != (example.target,):
            wanted = " | ".join(str(reference) for reference in dict.fromkeys(example.references))
            console.print(Text.assemble(("compared with  ", "dim"), wanted))
    if left_out := bad_input.summary():
        console.print(Text(f"\nskipped: {left_out}", "yellow"))


def _sizes(task: Task, source: TaskSource | None) -> dict[str, int]:
    """Records that are really there, by split."""
    from altup.data.bad_input import BadInput

    if source is None:
        return {}
    return {
        split: sum(1 for _ in source.records(task, split, BadInput("skip")))
        for split in task.published
        if source.has(task, split)
    }


def _size_text(task: Task, split: str, found: dict[str, int], counted: bool) -> str:
    whole = task.published[split]
    if not counted:
        return f"{whole:,}"
    have = found.get(split, 0)
    return f"{have:,}" if have == whole else f"{have:,} of {whole:,}"
