"""Scores of tasks and suites: the mean over tasks of the mean within each task; and scores.json, which adds up.

An evaluation adds its tasks to those that an earlier one left in the same folder, if that was of the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from altup.core.files import atomic_write, parse_json, read_json, refuse_foreign, sha256_of
from altup.data.bad_input import BadInput
from altup.data.tasks import SUITES, Example, Task
from altup.evaluation.metrics import compute_metrics

SCORES = "scores.json"


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


def summarise(scores: Sequence[TaskScore], model: str, checkpoint: str | None = None) -> dict[str, Any]:
    """JSON for programs: which model, every task, every suite. `checkpoint` tells its weights from others."""
    skipped = BadInput()
    for score in scores:
        skipped.add(score.skipped)
    return {
        "model": model,
        "checkpoint": checkpoint,
        "tasks": [s.to_json() for s in scores],
        "suites": [s.to_json() for s in score_suites(scores)],
        "skipped": skipped.state(),
    }


def write_scores(folder: Path, summary: dict[str, Any]) -> Path:
    path = folder / SCORES
    atomic_write(path, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return path


def refuse_foreign_results(folder: Path, predictions: Iterable[Path]) -> None:
    """UserError for scores or predictions that would be written over, unless an earlier evaluation wrote them."""
    refuse_foreign(folder / SCORES, _are_scores, "of an evaluation")
    for path in predictions:
        refuse_foreign(path, are_predictions, "of an evaluation")


def _are_scores(path: Path) -> bool:
    try:
        found = read_json(path)
    except ValueError:
        return False
    return isinstance(found, dict) and "model" in found and isinstance(found.get("tasks"), list)


def are_predictions(path: Path) -> bool:
    """By the first of them."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        found = parse_json(first)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() >= {"input", "prediction"}


def weights_identity(place: str, model: Any) -> str:
    """What tells a model's weights from others: a hash of its folder's files, or the hub's name and commit."""
    folder = Path(place)
    if not folder.is_dir():
        return f"{place}@{getattr(model.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("model*.safetensors")]):
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def stored_scores(folder: Path, place: str, checkpoint: str) -> tuple[list[TaskScore], str]:
    """The scores of this checkpoint in `folder`, and what to say of those that will be replaced.

    Training names its own scores by the step alone, in the folder of the run: a checkpoint `step-N` there is it.
    """
    path = folder / SCORES
    if not path.exists():
        return [], ""
    try:
        stored = read_json(path)
        scores = [TaskScore.from_json(task) for task in stored["tasks"]]
        model, of = stored["model"], stored.get("checkpoint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], f"{path} cannot be read; it is replaced"
    if of == checkpoint or (of is None and model == Path(place).name):
        return scores, ""
    names = ", ".join(score.task for score in scores)
    return [], (
        f"{path} belongs to another checkpoint ({model}): its scores of {names} are replaced; "
        "predictions of tasks that are not scored again stay as they are"
    )


def merge_scores(before: Sequence[TaskScore], now: Sequence[TaskScore]) -> list[TaskScore]:
    """All tasks in the order in which they came; one that was scored again has its new score."""
    return list({score.task: score for score in (*before, *now)}.values())


def scored_again(before: Sequence[TaskScore], limit: int | None, tasks: Sequence[str]) -> list[str]:
    """What to say of tasks that have a score, with the same limit or another."""
    return [
        f"{score.task}: the score with {_limit(score.limit)} is replaced by one with {_limit(limit)}"
        if score.limit != limit
        else f"{score.task}: its earlier score and predictions are replaced"
        for score in before
        if score.task in tasks
    ]


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else f"--limit {limit}"
