"""A task's examples: its records from a folder of files or Hugging Face `datasets`, as text, and as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from altup.core.errors import UserError
from altup.core.files import sha256_of
from altup.data.bad_input import BadInput
from altup.data.sources import HubDataset
from altup.data.tasks.task import JSON_LINES, BadRecordError, Example, Record, Task
from altup.data.text_files import check_unpacked_size, damage_reported, read_json_lines

TEXTS = 1_000  # texts tokenised at a time, which bounds the memory of their token lists
# A folder may hold a single validation or test file for MNLI; it then counts as the matched split.
STANDS_FOR = {"validation_matched": "validation", "test_matched": "test"}
UNLABELLED = "no label"
IDS = ("idx", "id", "question_id")  # what the published sets call a record's name


class TaskSource(Protocol):
    def has(self, task: Task, split: str) -> bool: ...

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        """Each record with a name for its place, in a fixed order."""

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        """JSON-able identity: equal for equal records."""


class TaskFolder:
    """`<folder>/<task.folder>/<split>.jsonl` (.gz, .zst), with the fields of the Hugging Face sets."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"data {str(path)!r} is no folder; give one with <suite>/<task>/<split>.jsonl files")

    def find(self, task: Task, split: str) -> Path | None:
        folder = self.path / (task.folder or task.name)
        for name in (split, STANDS_FOR.get(split)):
            for ending in JSON_LINES:
                if name and (path := folder / f"{name}{ending}").exists():
                    return path
        return None

    def has(self, task: Task, split: str) -> bool:
        return self.find(task, split) is not None

    def _file(self, task: Task, split: str) -> Path:
        path = self.find(task, split)
        if path is None:
            folder = self.path / (task.folder or task.name)
            raise UserError(f"task {task.name}: {folder} has no {split}.jsonl (.gz, .zst); put it there")
        return path

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        return _read_records(self._file(task, split), bad_input)

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return _identity(self._file(task, split))


class OwnFiles:
    """The files that a user's own task names itself."""

    def has(self, task: Task, split: str) -> bool:
        return split in task.files

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        if split not in task.files:
            raise UserError(f"task {task.name!r} has no {split} file; put {split}.jsonl into its folder")
        return _read_records(task.files[split], bad_input)

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return _identity(task.files[split])


class TaskHub:
    """Hugging Face `datasets` by name, or a dataset on disk through the same library."""

    def _dataset(self, task: Task, split: str) -> HubDataset:
        if task.hub is None:
            raise UserError(f"task {task.name!r} is not on the hub; give the folder of its files with --data")
        name, config = task.hub
        files = f"{task.folder or task.name}/{split}.jsonl"
        return HubDataset(name, config, split, otherwise=f"give the folder that holds {files} with --data DIR")

    def has(self, task: Task, split: str) -> bool:
        return task.hub is not None

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        dataset = self._dataset(task, split)
        records, number = iter(dataset.load()), 0
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # whatever the library and the network raise
                raise UserError(
                    f"dataset {dataset.name!r}, {split}, failed after record {number} "
                    f"({type(error).__name__}: {error}); check the network, or give files with --data DIR"
                ) from error
            number += 1
            yield f"dataset {dataset.name}, {split}, record {number}", record

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return self._dataset(task, split).describe()


def open_tasks(data: str | None) -> TaskSource:
    """The source that `--data` names: a folder, or the hub where there is none."""
    if data == "":
        raise UserError("data='' is empty; give a folder, or nothing for the hub")
    return TaskFolder(data) if data else TaskHub()


def source_of(task: Task, source: TaskSource) -> TaskSource:
    return OwnFiles() if task.files else source


def _identity(path: Path) -> dict[str, Any]:
    """The hash of the whole file: one corrected label in its middle makes it another task."""
    try:
        return {"name": path.name, "sha256": sha256_of(path)}
    except OSError as error:
        raise UserError(f"file {path} cannot be read ({error.strerror}); make it readable or remove it") from None


def _read_records(path: Path, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
    """The objects of a file, one a line."""
    with damage_reported(path, bad_input):
        check_unpacked_size(path, bad_input.limits)
        for _, where, record in read_json_lines(path, bad_input):
            if isinstance(record, dict):
                yield where, record
            else:
                bad_input.report("broken JSON", where, f"a {type(record).__name__}, not an object")


def read_examples(
    task: Task, split: str, source: TaskSource, bad_input: BadInput, training: bool | None = None
) -> Iterator[Example]:
    """The examples of a split; bad records go to `bad_input`. `training` is true for `train` by default."""
    training = split == "train" if training is None else training
    for where, record in source_of(task, source).records(task, split, bad_input):
        if task.is_unlabelled(record):
            bad_input.report(UNLABELLED, where, "altup evaluate --predict-only answers such records")
            continue
        for example in _write(task, record, training, where, bad_input):
            if task.labels and example.target not in task.labels:
                known = ", ".join(task.labels)
                bad_input.report("label outside its set", where, f"{example.target!r}; known are {known}")
                continue
            if bad_input.accept(example.input, where) and bad_input.accept(example.target, where):
                yield example


def _write(task: Task, record: Record, training: bool, where: str, bad_input: BadInput) -> list[Example]:
    try:
        return task.write(record, training)
    except BadRecordError as error:
        bad_input.report(error.reason, where, str(error))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # A user's own task that does not check its records.
        bad_input.report("unreadable record", where, f"{task.name}: {type(error).__name__}: {error}")
    return []


def read_inputs(
    task: Task, split: str, source: TaskSource, bad_input: BadInput
) -> Iterator[tuple[dict[str, Any], Example]]:
    """What a split asks: each record's id (`{"idx": 7}`) and its example, whose answer is a stand-in.

    Labels, if there are any, are not read; but either all records have one or none has.
    """
    if not task.answer_fields:
        raise UserError(
            f"task {task.name} does not say which fields hold its answers; "
            "declare them: Task(…, answer_fields={'label': 0})"
        )
    first: tuple[str, bool] | None = None
    for number, (where, record) in enumerate(source_of(task, source).records(task, split, bad_input)):
        unlabelled = task.is_unlabelled(record)
        first = first or (where, unlabelled)
        if unlabelled != first[1]:
            has, had = ("no", "one") if unlabelled else ("a", "none")
            raise UserError(f"{where} has {has} label, and {first[0]} has {had}; predict them as two sets")
        name = next((name for name in IDS if record.get(name) is not None), None)
        place = {name: record[name]} if name else {"idx": number}
        for example in _write(task, {**record, **task.answer_fields}, False, where, bad_input):
            if bad_input.accept(example.input, where):
                yield place, example


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
        unlabelled = UNLABELLED in bad_input.state()
        what_to_do = "predict records without labels with --predict-only" if unlabelled else "check its files"
        raise UserError(f"task {task.name}, split {split}: no usable example; {what_to_do}")
    return found


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens of different lengths: row i is `flat[ends[i-1]:ends[i]]`. `cut` counts shortened rows."""

    flat: np.ndarray
    ends: np.ndarray
    cut: int

    @classmethod
    def of(cls, rows: Sequence[np.ndarray], cut: int = 0) -> Tokens:
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate(rows) if rows else np.empty(0, np.int32), ends, cut)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.ends[row - 1] if row else 0 : self.ends[row]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


def tokenise(
    tokenizer: Any,
    texts: Sequence[str],
    length: int,
    before: Sequence[int] = (),
    after: Sequence[int] | None = None,
) -> Tokens:
    """Each text as at most `length` tokens, between those of `before` and `after`, which is eos unless given; a
    text that is too long loses its end. Special tokens in a text are plain text."""
    after = [tokenizer.eos_token_id] if after is None else after
    room = length - len(before) - len(after)
    rows: list[np.ndarray] = []
    cut = 0
    for begin in range(0, len(texts), TEXTS):
        batch = list(texts[begin : begin + TEXTS])
        encoded = tokenizer(
            batch, add_special_tokens=False, return_attention_mask=False, split_special_tokens=True
        )
        for ids in encoded["input_ids"]:
            cut += len(ids) > room
            rows.append(np.array([*before, *ids[: max(room, 0)], *after], np.int32))
    return Tokens.of(rows, cut)


def pad(rows: Sequence[np.ndarray], length: int, filler: int) -> np.ndarray:
    """`[rows, length]`, padded with `filler` on the right."""
    padded = np.full((len(rows), length), filler, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
