"""Scores of a model on tasks: decode, compare, and keep what it said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write
from altup.data.bad_input import BadInput
from altup.data.tasks import Example, Task
from altup.data.tasks.examples import TaskSource, load_examples, source_of, tokenise
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.evaluation.decoding import decode
from altup.evaluation.metrics import check_metrics
from altup.evaluation.scores import SuiteScore, TaskScore, score_suites, score_task

SCORES = "scores.json"


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
            raise UserError(f"task {task.name}: no {' or '.join(task.held_out)} in the data; leave the task out")
        bad = BadInput(bad_input.on_error, bad_input.limits)
        splits = {split: load_examples(task, split, source, bad, limit, training=False) for split in present}
        bad_input.add(bad.state())
        found.append(HeldOutTask(task, splits, limit, bad.state()))
    return found


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    held_out: Sequence[HeldOutTask],
    out: Path | None = None,
    inputs_length: int = INPUTS_LENGTH,
    targets_length: int = TARGETS_LENGTH,
    **options: Any,
) -> list[TaskScore]:
    """Every task's score. With `out`, predictions go to `out/<task>.<split>.jsonl`. `options` go to `decode`."""
    scores = []
    for held in held_out:
        task, predictions = held.task, {}
        most = dict(zip(("inputs", "targets"), task.lengths(inputs_length, targets_length), strict=True))
        cut = dict.fromkeys(most, 0)
        for split, examples in held.splits.items():
            inputs = tokenise(tokenizer, [example.input for example in examples], most["inputs"])
            cut["inputs"] += inputs.cut
            cut["targets"] += tokenise(tokenizer, [e.target for e in examples], most["targets"]).cut
            predictions[split] = decode(
                model, tokenizer, inputs, inputs_length=most["inputs"], targets_length=most["targets"], **options
            )
        scores.append(score_task(task, predictions, held.splits, held.limit, held.skipped, most, cut))
        if out is not None:
            for split, examples in held.splits.items():
                write_predictions(out / f"{task.name}.{split}.jsonl", predictions[split], examples)
    return scores


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


def summarise(scores: Sequence[TaskScore], model: str, checkpoint: str | None = None) -> dict[str, Any]:
    """JSON for programs: which model, every task, every suite. `checkpoint` tells its weights from others."""
    suites: list[SuiteScore] = score_suites(scores)
    skipped = BadInput()
    for score in scores:
        skipped.add(score.skipped)
    return {
        "model": model,
        "checkpoint": checkpoint,
        "tasks": [s.to_json() for s in scores],
        "suites": [s.to_json() for s in suites],
        "skipped": skipped.state(),
    }


def write_scores(folder: Path, summary: dict[str, Any]) -> Path:
    path = folder / SCORES
    atomic_write(path, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return path
