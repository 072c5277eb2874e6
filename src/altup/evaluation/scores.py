"""Scores of tasks and suites: the mean over tasks of the mean within each task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from altup.data.tasks import SUITES, Example, Task
from altup.evaluation.metrics import compute_metrics


@dataclass(frozen=True)
class TaskScore:
    """A task's metrics in percent, averaged over its held-out splits.

    `missing` says what data was not there, `limit` how many examples of a split were asked for at most, and
    `skipped` which records were none. `lengths` are the most tokens of inputs and answers, `cut` how many inputs
    were longer, and how many targets, which no answer can then equal.
    """

    task: str
    metrics: dict[str, float]
    examples: dict[str, int]
    splits: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    limit: int | None = None
    skipped: dict[str, Any] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def score(self) -> float:
        return sum(self.metrics.values()) / len(self.metrics)

    @property
    def partial(self) -> bool:
        return bool(self.missing)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "missing": list(self.missing), "score": self.score, "partial": self.partial}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TaskScore:
        known = {name: values[name] for name in ("task", "metrics", "examples", "splits")}
        return cls(
            **known,
            missing=tuple(values["missing"]),
            limit=values.get("limit"),
            skipped=values.get("skipped", {}),
            lengths=values.get("lengths", {}),
            cut=values.get("cut", {}),
        )


@dataclass(frozen=True)
class SuiteScore:
    """The mean of its tasks' scores; `partial` if a task is missing or was scored on a part of its data."""

    suite: str
    score: float
    tasks: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def partial(self) -> bool:
        return bool(self.missing)

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "score": self.score,
            "tasks": list(self.tasks),
            "missing": list(self.missing),
            "partial": self.partial,
        }


def score_task(
    task: Task,
    predictions: Mapping[str, Sequence[str]],
    examples: Mapping[str, Sequence[Example]],
    limit: int | None = None,
    skipped: dict[str, Any] | None = None,
    lengths: dict[str, int] | None = None,
    cut: dict[str, int] | None = None,
) -> TaskScore:
    """The score of predictions by split, against all splits the task should be scored on."""
    splits = {split: compute_metrics(task, predictions[split], examples[split]) for split in examples}
    means = {name: sum(s[name] for s in splits.values()) / len(splits) for name in task.metrics}
    counts = {split: len(found) for split, found in examples.items()}
    missing = []
    for split in task.held_out:
        wanted = task.published.get(split)
        if split not in counts:
            missing.append(f"{split} is not there")
        elif wanted is not None and counts[split] != wanted:
            missing.append(f"{split} {counts[split]:,} of {wanted:,}")
    return TaskScore(
        task.name, means, counts, splits, tuple(missing), limit, skipped or {}, lengths or {}, cut or {}
    )


def suites_of(names: Iterable[str]) -> list[str]:
    """The suites of which more than one task is named."""
    known = set(names)
    return [suite for suite, members in SUITES.items() if len(known.intersection(members)) > 1]


def score_suites(scores: Sequence[TaskScore]) -> list[SuiteScore]:
    """Every suite of which more than one task was scored."""
    by_name = {score.task: score for score in scores}
    found = []
    for suite in suites_of(by_name):
        present = [by_name[name] for name in SUITES[suite] if name in by_name]
        missing = [f"{name}: not scored" for name in SUITES[suite] if name not in by_name]
        missing += [f"{score.task}: {part}" for score in present for part in score.missing]
        mean = sum(score.score for score in present) / len(present)
        found.append(SuiteScore(suite, mean, tuple(s.task for s in present), tuple(missing)))
    return found
