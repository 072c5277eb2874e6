"""Predictions for records without labels, such as a test set to be submitted: decode, store, score nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write, make_folder, refuse_foreign
from altup.data.bad_input import BadInput
from altup.data.tasks import Example, Task
from altup.data.tasks.examples import TaskSource, open_tasks, read_inputs, source_of
from altup.evaluation.answering import answering_of
from altup.evaluation.config import EvaluateConfig
from altup.evaluation.decoding import decode
from altup.evaluation.evaluate import choose_tasks, counter, predictions_file
from altup.evaluation.loading import find_model_place, load_to_answer
from altup.evaluation.metrics import predicted_label
from altup.evaluation.scores import are_predictions

Asked = list[tuple[dict[str, Any], Example]]  # a record's id and its example


@dataclass(frozen=True)
class PredictedSplit:
    """The predictions of a split: their file, their number, how many are no label, how many inputs were cut."""

    task: str
    split: str
    file: str
    examples: int
    unknown: int
    cut: int


@dataclass(frozen=True)
class Predictions:
    model: str
    folder: Path
    splits: list[PredictedSplit]
    bad_input: BadInput

    @property
    def summary(self) -> dict[str, Any]:
        splits = [asdict(split) for split in self.splits]
        return {"model": self.model, "predictions": splits, "skipped": self.bad_input.state()}


def predict_model(
    model: str,
    tasks: Sequence[str] = (),
    suites: Sequence[str] = (),
    config: EvaluateConfig | None = None,
    *,
    split: str = "test",
    out: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predictions:
    """Write what a model answers to the records of a split to `out/predictions/<task>.<split>.jsonl`.

    The arguments are those of `evaluate`. `test` and `validation` stand for both of MNLI's.
    """
    config = config or EvaluateConfig()
    source, bad_input = open_tasks(config.data), BadInput(config.on_error)
    chosen = choose_tasks(tasks, suites, lambda task: bool(_present(task, split, source)))
    asked = {
        (task.name, part): _load_inputs(task, part, source, bad_input, config.limit)
        for task in chosen
        for part in _present(task, split, source) or _parts(task, split)[:1]  # reading what is not there says so
    }
    found = find_model_place(model)
    folder = (out or found.scores) / "predictions"
    by_name = {task.name: task for task in chosen}
    for name, part in asked:
        refuse_foreign(predictions_file(folder, by_name[name], part), are_predictions, "of an evaluation")
    answering = answering_of(found.place)
    longest = config.inputs_length or found.inputs_length, config.targets_length or found.targets_length
    for task in chosen:
        answering.check(task, *task.lengths(*longest))
    make_folder(folder)
    loaded = load_to_answer(answering, config.precision)
    count = counter(progress, sum(map(len, asked.values())))
    written = []
    for (name, part), records in asked.items():
        task = by_name[name]
        lengths = task.lengths(*longest)
        inputs = answering.inputs([example.input for _, example in records], lengths[0])
        answers = decode(
            *(loaded.model, answering, inputs),
            task=task,
            inputs_length=lengths[0],
            targets_length=lengths[1],
            batch_size=config.batch_size,
            autocast=loaded.autocast,
            progress=count,
        )
        path = predictions_file(folder, task, part)
        unknown = write_answers(path, task, answers, records)
        written.append(PredictedSplit(name, part, str(path), len(records), unknown, inputs.cut))
    return Predictions(found.place, folder, written, bad_input)


def _parts(task: Task, split: str) -> tuple[str, ...]:
    return {"test": task.test_splits(), "validation": task.held_out}.get(split, (split,))


def _present(task: Task, split: str, source: TaskSource) -> list[str]:
    return [part for part in _parts(task, split) if source_of(task, source).has(task, part)]


def _load_inputs(task: Task, split: str, source: TaskSource, bad_input: BadInput, limit: int | None) -> Asked:
    found = list(islice(read_inputs(task, split, source, bad_input), limit))
    if not found:
        raise UserError(f"task {task.name}, split {split}: no usable record; check its files")
    return found


def write_answers(path: Path, task: Task, answers: Sequence[str], records: Asked) -> int:
    """One JSON object a record, in the order of the data; returns how many answers are no label of the task."""
    lines, unknown = [], 0
    for answer, (place, example) in zip(answers, records, strict=True):
        label = predicted_label(task, answer, example)
        unknown += label.get("label", 0) is None
        line = {**place, "input": example.input, "prediction": answer, **label}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    atomic_write(path, "".join(lines))
    return unknown
