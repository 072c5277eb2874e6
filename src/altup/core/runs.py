"""Folders of runs, as a reader finds them: what lies where, checkpoints, and the model that a name means."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from altup.core.errors import UserError
from altup.core.hub import find_pretrained, missing_folder
from altup.core.sealed_folders import MANIFEST, damage

STEP = re.compile(r"step-(\d+)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPaths:
    """Names of what lies in a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def card(self) -> Path:
        return self.path / "README.md"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, whole or damaged."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """17 for `.../step-17`."""
    match = STEP.fullmatch(checkpoint.name)
    if not match:
        raise UserError(f"{checkpoint} is not named like a checkpoint; expected step-N")
    return int(match[1])


def newest_whole(folder: Path, at_most: int | None = None) -> Path | None:
    """The checkpoint with the highest step (up to `at_most`) whose manifest verifies; the log says which were
    passed over."""
    for checkpoint in reversed(list_checkpoints(folder)):
        if at_most is not None and step_of(checkpoint) > at_most:
            continue
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        log.warning("passing over the damaged checkpoint %s: %s", checkpoint, problem)
    return None


def newest_model(path: Path) -> Path:
    """The model folder that `path` means: itself, or a run's final model, or its newest whole checkpoint."""
    if (path / "config.json").exists():
        return _checked(path)
    run = RunPaths(path)
    if (run.final / "config.json").exists():
        return _checked(run.final, "resume the run (--resume), which makes it again from its last checkpoint")
    found = newest_whole(run.checkpoints) if run.checkpoints.is_dir() else None
    if found is None:
        if not path.exists():
            raise missing_folder(path)
        raise UserError(
            f"{path}: neither a model folder (config.json) nor a run with a checkpoint (checkpoints/step-N)"
        )
    return found


def _checked(model: Path, remedy: str = "take another checkpoint") -> Path:
    """A model folder, if it has no manifest or agrees with it."""
    if (model / MANIFEST).exists() and (wrong := damage(model)):
        raise UserError(f"{model} is damaged: {wrong}; {remedy}, or remove {MANIFEST} if the change is meant")
    return model


def find_model(name: str) -> str:
    """The model folder that a run or a folder means; any other name is one on the hub."""
    place = find_pretrained(name)
    return str(newest_model(Path(place))) if Path(place).exists() else place
