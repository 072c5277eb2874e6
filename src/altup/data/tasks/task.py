"""What a task is: records in, pairs of input and target text out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # endings of a task's files
INPUTS_LENGTH, TARGETS_LENGTH = 512, 128  # tokens, unless a run or a task says otherwise


@dataclass(frozen=True)
class Example:
    """One example as text. `references` are what a prediction is compared with: accepted answers, or a value.

    `group` names what belongs together where a metric asks for it (MultiRC: the question of an answer).
    """

    input: str
    target: str
    references: tuple[Any, ...]
    group: str = ""


class BadRecordError(ValueError):
    """A record that is no example of its task; `reason` is what is counted, the text says the details."""

    def __init__(self, reason: str, details: str):
        super().__init__(details)
        self.reason = reason


@dataclass(frozen=True)
class Task:
    """A declaration. `name` is `suite/task`, or a bare name for a task in no suite.

    - `write(record, training)` gives the examples of a record: none (skipped), one, or several;
    - `metrics` are names in `altup.evaluation.metrics`, `labels` the targets of a classification in the order of
      their numbers;
    - `answer_fields` are the fields that hold a record's answer, each with a stand-in for it where an answer is
      to be predicted;
    - `folder` is where its files lie below a data folder, `hub` its (name, config) as a Hugging Face dataset;
    - `layout` shows an input, with the record's fields in braces;
    - `inputs_length` and `targets_length` are its own limits in tokens, where it has any;
    - `held_out` are the splits it is scored on, equally weighted, and `published` the sizes of complete splits;
    - `files` are a user's own files by split, in place of a source.
    """

    name: str
    write: Callable[[Record, bool], list[Example]]
    metrics: tuple[str, ...]
    description: str = ""
    layout: str = ""
    labels: tuple[str, ...] = ()
    answer_fields: Mapping[str, Any] = field(default_factory=dict)
    inputs_length: int | None = None
    targets_length: int | None = None
    folder: str = ""
    hub: tuple[str, str | None] | None = None
    held_out: tuple[str, ...] = ("validation",)
    published: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def suite(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2]

    def test_splits(self) -> tuple[str, ...]:
        """`test`, or MNLI's two, as those that it is scored on."""
        ends = [split.removeprefix("validation") for split in self.held_out if split.startswith("validation")]
        return tuple(f"test{end}" for end in ends or [""])

    def is_unlabelled(self, record: Record) -> bool:
        return bool(self.answer_fields) and all(is_blank(record.get(name)) for name in self.answer_fields)

    def lengths(self, inputs: int = INPUTS_LENGTH, targets: int = TARGETS_LENGTH) -> tuple[int, int]:
        """The most tokens of an input and of a target: what a run asks for, or the task's own where it is less."""
        return min(inputs, self.inputs_length or inputs), min(targets, self.targets_length or targets)


def is_blank(value: Any) -> bool:
    """Whether a field holds no answer: nothing, or −1, `<unk>` or no texts, as in Hugging Face's test sets."""
    if isinstance(value, Mapping):
        return all(map(is_blank, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_blank, value))
    return value is None or value in ("", "<unk>", -1)


def text_of(record: Record, name: str) -> str:
    """A record's field that must be text."""
    value = value_of(record, name)
    if not isinstance(value, str):
        raise BadRecordError("wrong kind of field", f"{name}={value!r} is no text")
    return value


def value_of(record: Record, name: str) -> Any:
    if name in record and record[name] is None:
        raise BadRecordError("missing field", f"{name!r} is null")
    if name not in record:
        raise BadRecordError("missing field", f"no {name!r} among {', '.join(map(str, record)) or 'no fields'}")
    return record[name]


def texts_of(record: Record, name: str) -> list[str]:
    """A record's field that must be a list of at least one text."""
    value = value_of(record, name)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) for v in value):
        raise BadRecordError("wrong kind of field", f"{name}={value!r} is no list of texts")
    return list(value)


def label_of(record: Record, labels: tuple[str, ...], name: str = "label") -> str:
    """The text of a record's numbered label."""
    number = value_of(record, name)
    if isinstance(number, float) or not isinstance(number, int) or not 0 <= number < len(labels):
        raise BadRecordError(
            "label outside its set",
            f"{name}={number!r}; known are {', '.join(f'{i} ({text})' for i, text in enumerate(labels))}",
        )
    return labels[number]
