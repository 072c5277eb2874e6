"""The data of a fine-tuning run: which tasks can be trained and scored, and the mixture of their examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.data.bad_input import BadInput
from altup.data.tasks import SUITES, Task, find_task
from altup.data.tasks.examples import TaskSource, load_examples, open_tasks, source_of, tokenise
from altup.data.tasks.registry import add_task
from altup.evaluation.evaluate import HeldOutTask, has_held_out, load_held_out
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.mixture import Mixture, TrainingTask, shares_of


@dataclass(frozen=True)
class FinetuneData:
    mixture: Mixture
    held_out: list[HeldOutTask]


def load_data(
    config: FinetuneConfig,
    tokenizer: Any,
    bad_input: BadInput,
    say: Callable[[str], None],
    packing: str | None = None,
) -> FinetuneData:
    """Tokenise the training examples and read the held-out ones; `say` is told what is missing or was cut."""
    source = open_tasks(config.data)
    groups: list[tuple[float | None, list[int]]] = []
    training: list[TrainingTask] = []
    scored: list[Task] = []
    known: dict[str, Task] = {}
    for name, weight in config.weighted_names():
        members = [find_task(member) for member in SUITES.get(name, (name,))]
        found = [task for task in members if add_task(task, known)]
        if weight is not None and len(found) < len(members):
            twice = next(task.name for task in members if task not in found)
            raise UserError(f"task {twice} is named twice, so that its weight is not clear; name it once")
        present = [t for t in found if source_of(t, source).has(t, "train")]
        for task in found:
            if task not in present:
                if name not in SUITES:
                    place = Path(config.data, task.folder or task.name) if config.data else "its folder"
                    raise UserError(
                        f"task {task.name}: no training examples; put train.jsonl into {place}, or leave it out"
                    )
                say(f"{task.name}: no training examples in the data; it is not trained")
        loaded = [_load_training(task, source, tokenizer, config, bad_input, say) for task in present]
        training += loaded
        groups.append((weight, [len(task) for task in loaded]))
        scored += [task for task in found if _can_be_scored(task, source, say)]
    if not training:
        raise UserError("none of the tasks has training examples; check --data")
    shares = shares_of([group for group in groups if group[1]])
    mixture = Mixture(training, shares, config.batch_size, tokenizer.pad_token_id, config.seed, packing)
    return FinetuneData(mixture, load_held_out(scored, source, bad_input, config.eval_limit))


def describe_held_out(held_out: list[HeldOutTask], config: FinetuneConfig) -> str:
    """A hash of what scores are measured on, and how: others cannot be compared with them."""
    digest = hashlib.sha256(repr((config.eval_limit, config.inputs_length, config.targets_length)).encode())
    for held in held_out:
        digest.update(repr((held.task.name, held.splits)).encode())
    return digest.hexdigest()[:16]


def _load_training(
    task: Task,
    source: TaskSource,
    tokenizer: Any,
    config: FinetuneConfig,
    bad_input: BadInput,
    say: Callable[[str], None],
) -> TrainingTask:
    examples = load_examples(task, "train", source, bad_input)
    lengths = task.lengths(config.inputs_length, config.targets_length)
    inputs = tokenise(tokenizer, [e.input for e in examples], lengths[0])
    targets = tokenise(tokenizer, [e.target for e in examples], lengths[1])
    for what, tokens, length in zip(("inputs", "targets"), (inputs, targets), lengths, strict=True):
        if tokens.cut:
            say(f"{task.name}: {tokens.cut:,} of {len(tokens):,} {what} exceed {length} tokens and were cut")
    return TrainingTask(task.name, inputs, targets)


def _can_be_scored(task: Task, source: TaskSource, say: Callable[[str], None]) -> bool:
    if task.files and task.files.get("train") == task.files.get("validation"):
        say(f"{task.name}: one file is all there is, so nothing is held out; give a folder with validation.jsonl")
        return False
    if not has_held_out(task, source):
        say(f"{task.name}: no held-out examples in the data; it is not scored")
        return False
    return True
