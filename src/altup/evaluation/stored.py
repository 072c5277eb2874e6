"""Scores that add up: what an earlier `evaluate` left in a folder, as long as it is of the same weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altup.core.files import sha256_of
from altup.evaluation.evaluate import SCORES
from altup.evaluation.scores import TaskScore


def identity(place: str, model: Any) -> str:
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
        stored = json.loads(path.read_text(encoding="utf-8"))
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


def add_up(before: Sequence[TaskScore], now: Sequence[TaskScore]) -> list[TaskScore]:
    """All tasks in the order in which they came; one that was scored again has its new score."""
    return list({score.task: score for score in (*before, *now)}.values())


def other_limits(before: Sequence[TaskScore], limit: int | None, tasks: Sequence[str]) -> list[str]:
    """What to say of tasks that are scored again with another limit."""
    return [
        f"{score.task}: the score with {_limit(score.limit)} is replaced by one with {_limit(limit)}"
        for score in before
        if score.task in tasks and score.limit != limit
    ]


def _limit(limit: int | None) -> str:
    return "no limit" if limit is None else f"--limit {limit}"
