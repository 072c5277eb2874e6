"""Scores of a model on tasks: decode, compare, and store the predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write, make_folder
from altup.data.bad_input import BadInput
from altup.data.tasks import Example, Task, find_tasks
from altup.data.tasks.examples import TaskSource, load_examples, open_tasks, source_of
from altup.data.tasks.registry import check_suite
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.evaluation.answering import Answering, answering_of
from altup.evaluation.config import EvaluateConfig
from altup.evaluation.decoding import decode
from altup.evaluation.loading import find_model_place, load_to_answer
from altup.evaluation.metrics import check_metrics
from altup.evaluation.scores import (
    TaskScore,
    merge_scores,
    refuse_foreign_results,
    score_task,
    scored_again,
    stored_scores,
    summarise,
    weights_identity,
    write_scores,
)


@dataclass(frozen=True)
class Evaluation:
    """What is in the folder after an evaluation: its scores and those of earlier ones, as objects and as JSON."""

    model: str
    folder: Path
    scores: list[TaskScore]
    summary: dict[str, Any]
    bad_input: BadInput


def evaluate(
    model: str,
    tasks: Sequence[str] = (),
    suites: Sequence[str] = (),
    config: EvaluateConfig | None = None,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score a run, a model folder or a model on the hub, and keep its predictions and scores in a folder.

    `tasks` and `suites` are names, or a user's own files. `out` is by default in the run. Scores that the same
    weights have in `out` are kept.

    Args:
        model: A run, a checkpoint, a model folder or a name on the hub.
        tasks: Names of tasks, or your own files.
        suites: Names of suites: `glue`, `super_glue`.
        config: Where the data lies, how much of it is read, and how it is decoded.
        out: Where predictions and scores go.
        say: Called with notes for the user.
        progress: Called with the number of examples decoded and of all.

    Returns:
        The scores, their folder, and what was skipped.

    Examples:
        >>> import altup
        >>> config = altup.EvaluateConfig(data="tasks", limit=100)
        >>> scores = altup.evaluate("runs/desks", tasks=["desks"], config=config).scores  # doctest: +SKIP
    """
    config = config or EvaluateConfig()
    source, bad_input = open_tasks(config.data), BadInput(config.on_error)
    present = choose_tasks(tasks, suites, lambda task: has_held_out(task, source))
    found = find_model_place(model)
    held_out = load_held_out(present, source, bad_input, config.limit)
    out = out or found.scores
    written = [predictions_file(out, held.task, split) for held in held_out for split in held.splits]
    refuse_foreign_results(out, written)
    answering = answering_of(found.place)
    lengths = config.inputs_length or found.inputs_length, config.targets_length or found.targets_length
    for task in present:
        answering.check(task, *task.lengths(*lengths))
    make_folder(out)  # fail before hours of decoding, if at all
    loaded = load_to_answer(answering, config.precision)
    weights = weights_identity(found.place, loaded.model)
    before, replaced = stored_scores(out, found.place, weights)
    for note in (replaced, *scored_again(before, config.limit, [task.name for task in present])):
        if note:
            say(note)
    scores = evaluate_tasks(
        loaded.model,
        answering,
        held_out,
        out,
        *lengths,
        batch_size=config.batch_size,
        autocast=loaded.autocast,
        progress=counter(progress, sum(map(len, held_out))),
    )
    scores = merge_scores(stored_scores(out, found.place, weights)[0], scores)  # read again: decoding is slow
    summary = summarise(scores, found.place, weights)
    write_scores(out, summary)
    return Evaluation(found.place, out, scores, summary, bad_input)


def choose_tasks(tasks: Sequence[str], suites: Sequence[str], has_data: Callable[[Task], bool]) -> list[Task]:
    """The tasks given by name, which must be there, and those of suites, which may lack some."""
    wanted = find_tasks([*map(check_suite, suites), *tasks])
    named = {task.name for task in find_tasks(tasks)} if tasks else set()
    present = [task for task in wanted if task.name in named or has_data(task)]
    if not present:
        raise UserError("none of the suite's tasks is in the data; check --data")
    return present


def counter(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A function that takes how many more are done, and reports how many are done of all."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    return count


@dataclass(frozen=True)
class HeldOutTask:
    """A task and its held-out examples by split, those splits that there are, at most `limit` of each."""

    task: Task
    splits: dict[str, list[Example]]
    limit: int | None = None
    skipped: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(examples) for examples in self.splits.values())


def has_held_out(task: Task, source: TaskSource) -> bool:
    return any(source_of(task, source).has(task, split) for split in task.held_out)


def load_held_out(
    tasks: Sequence[Task], source: TaskSource, bad_input: BadInput, limit: int | None = None
) -> list[HeldOutTask]:
    """The held-out examples of each task, at most `limit` a split; a task that has none is an error."""
    found = []
    for task in tasks:
        check_metrics(task)
        present = [split for split in task.held_out if source_of(task, source).has(task, split)]
        if not present:
            raise UserError(f"task {task.name}: no {' or '.join(task.held_out)} in the data; remove the task")
        bad = BadInput(bad_input.on_error, bad_input.limits)
        splits = {split: load_examples(task, split, source, bad, limit, training=False) for split in present}
        bad_input.add(bad.state())
        found.append(HeldOutTask(task, splits, limit, bad.state()))
    return found


def evaluate_tasks(
    model: Any,
    answering: Answering,
    held_out: Sequence[HeldOutTask],
    out: Path | None = None,
    inputs_length: int = INPUTS_LENGTH,
    targets_length: int = TARGETS_LENGTH,
    **options: Any,
) -> list[TaskScore]:
    """Every task's score. With `out`, predictions go to `out/<task>.<split>.jsonl`. `options` go to `decode`."""
    return [
        score_decoded(decode_task(model, answering, held, inputs_length, targets_length, **options), out)
        for held in held_out
    ]


@dataclass(frozen=True)
class Decoded:
    """A task's predictions by split, the most tokens of inputs and targets, and how many of these were cut."""

    held: HeldOutTask
    predictions: dict[str, list[str]]
    most: dict[str, int]
    cut: dict[str, int]


def decode_task(
    model: Any,
    answering: Answering,
    held: HeldOutTask,
    inputs_length: int = INPUTS_LENGTH,
    targets_length: int = TARGETS_LENGTH,
    **options: Any,
) -> Decoded:
    """The predictions for a task; of several processes, all must call it."""
    most = dict(zip(("inputs", "targets"), held.task.lengths(inputs_length, targets_length), strict=True))
    predictions, cut = {}, dict.fromkeys(most, 0)
    for split, examples in held.splits.items():
        inputs = answering.inputs([example.input for example in examples], most["inputs"])
        cut["inputs"] += inputs.cut
        cut["targets"] += answering.targets([e.target for e in examples], most["targets"]).cut
        predictions[split] = decode(
            *(model, answering, inputs),
            inputs_length=most["inputs"],
            targets_length=most["targets"],
            task=held.task,
            **options,
        )
    return Decoded(held, predictions, most, cut)


def score_decoded(decoded: Decoded, out: Path | None = None) -> TaskScore:
    """The score of a task's predictions, which are written with `out`."""
    held, predictions = decoded.held, decoded.predictions
    score = score_task(held.task, predictions, held.splits, held.limit, held.skipped, decoded.most, decoded.cut)
    if out is not None:
        for split, examples in held.splits.items():
            write_predictions(predictions_file(out, held.task, split), predictions[split], examples)
    return score


def predictions_file(folder: Path, task: Task, split: str) -> Path:
    return folder / f"{task.name}.{split}.jsonl"


def write_predictions(path: Path, predictions: Sequence[str], examples: Sequence[Example]) -> None:
    """One JSON object an example, in the order of the data."""
    lines = []
    for prediction, example in zip(predictions, examples, strict=True):
        record: dict[str, Any] = {"input": example.input, "target": example.target, "prediction": prediction}
        record["references"] = list(example.references)
        if example.group:
            record["group"] = example.group
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    atomic_write(path, "".join(lines))
