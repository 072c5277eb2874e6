"""A task's examples as text, and as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from altup.core.errors import UserError
from altup.data.bad_input import BadInput
from altup.data.tasks.sources import TaskSource, source_of
from altup.data.tasks.task import BadRecordError, Example, Task

TEXTS = 1_000  # tokenised at a time, so that token lists never pile up


def read_examples(
    task: Task, split: str, source: TaskSource, bad_input: BadInput, training: bool | None = None
) -> Iterator[Example]:
    """The examples of a split; records that are none go to `bad_input`. `training`: by default for `train`."""
    training = split == "train" if training is None else training
    for where, record in source_of(task, source).records(task, split, bad_input):
        try:
            examples = task.write(record, training)
        except BadRecordError as error:
            bad_input.report(error.reason, where, str(error))
            continue
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # of a task that does not look first
            bad_input.report("unreadable record", where, f"{task.name}: {type(error).__name__}: {error}")
            continue
        for example in examples:
            if task.labels and example.target not in task.labels:
                known = ", ".join(task.labels)
                bad_input.report("label outside its set", where, f"{example.target!r}; known are {known}")
                continue
            if bad_input.accept(example.input, where) and bad_input.accept(example.target, where):
                yield example


def load_examples(
    task: Task,
    split: str,
    source: TaskSource,
    bad_input: BadInput,
    limit: int | None = None,
    training: bool | None = None,
) -> list[Example]:
    """The first `limit` examples of a split, which must have one."""
    found = list(islice(read_examples(task, split, source, bad_input, training), limit))
    if not found:
        raise UserError(f"task {task.name}, split {split}: no usable example; check its files")
    return found


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens of different lengths: row i is `flat[ends[i-1]:ends[i]]`. `cut` counts shortened rows."""

    flat: np.ndarray
    ends: np.ndarray
    cut: int

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.ends[row - 1] if row else 0 : self.ends[row]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


def tokenise(tokenizer: Any, texts: Sequence[str], length: int) -> Tokens:
    """Each text as at most `length` tokens, the last of them eos. Names of tokens in a text are plain text."""
    rows: list[np.ndarray] = []
    cut = 0
    for begin in range(0, len(texts), TEXTS):
        batch = list(texts[begin : begin + TEXTS])
        encoded = tokenizer(
            batch, add_special_tokens=False, return_attention_mask=False, split_special_tokens=True
        )
        for ids in encoded["input_ids"]:
            cut += len(ids) >= length
            rows.append(np.array([*ids[: length - 1], tokenizer.eos_token_id], np.int32))
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return Tokens(np.concatenate(rows) if rows else np.empty(0, np.int32), ends, cut)


def pad(rows: Sequence[np.ndarray], length: int, filler: int) -> np.ndarray:
    """`[rows, length]`, filled up on the right."""
    padded = np.full((len(rows), length), filler, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
