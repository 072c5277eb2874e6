"""The folder of a run: its resolved config, metrics, checkpoints and final model, and whether it may resume."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from altup.core.errors import UserError, disk_remedy, named
from altup.core.files import Lock, atomic_write, is_locked, locked, make_durable
from altup.core.runs import RunPaths, list_checkpoints, newest_whole, step_of
from altup.core.schema import differences, read_settings
from altup.core.sealed_folders import remove_leftovers
from altup.training.checkpoints import STATE_FILE, read_state
from altup.training.config import TrainConfig

if TYPE_CHECKING:
    from altup.training.parallel import ProcessGroup

LOCK = ".lock"
BETWEEN_LOOKS = 1.0  # seconds
ANY_CONFIG = TypeVar("ANY_CONFIG", bound=TrainConfig)
# What a run that failed before its first record may have left in its folder.
BEFORE_THE_FIRST_RECORD = frozenset(
    {"config.yaml", "config.yaml.tmp", "metrics.jsonl", "metrics.jsonl.tmp", LOCK, "checkpoints", "tensorboard"}
    | {"wandb", "config.tmp", "metrics.tmp"}  # the last two by earlier versions
)


class RunFolder(RunPaths):
    """A run's folder while it is written: its lock, and whether a config may go on in it."""

    @property
    def started(self) -> bool:
        """Whether there is a run to resume; a run that failed before its first record left nothing."""
        has_records = self.config.exists() and self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_records or bool(list_checkpoints(self.checkpoints))

    @property
    def is_locked(self) -> bool:
        """Whether a process trains in it."""
        return is_locked(self.path / LOCK)

    @contextlib.contextmanager
    def lock(self, process_group: ProcessGroup) -> Iterator[FolderLock]:
        """Refuse a second run in this folder while one is running; the lock ends with the process."""
        if not process_group.is_first:
            yield FolderLock(self.path, None)
            return
        refusal = f"{self.path}: another process is training in this folder; wait for it or stop it"
        with locked(self.path / LOCK, refusal) as lock:
            held = FolderLock(self.path, lock)
            try:
                yield held
            except (OSError, UserError):
                held.check()  # a folder that is gone explains whatever failed
                raise

    def refuse_foreign(self, kind: type[TrainConfig]) -> None:
        """UserError, before anything is changed, for a folder that holds something other than a run."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another folder for the run")
        if not self.path.exists() or self.started:
            return
        others = sorted(path.name for path in self.path.iterdir() if path.name not in BEFORE_THE_FIRST_RECORD)
        if others:
            raise UserError(
                f"{self.path} holds {others[0]!r} and no run; choose an empty or new folder for the run"
            )
        if self.config.exists():
            self.read_config(kind)

    def saved_settings(self, resume: bool) -> dict[str, Any]:
        """What a run resumes with: its config.yaml or, where that is lost, the seal of its newest checkpoint."""
        if not resume or self.config.exists():
            return self._read_settings() if resume else {}
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            with contextlib.suppress(UserError, TypeError):  # a damaged one
                return read_state(checkpoint).config
        return {}

    def read_config(self, kind: type[ANY_CONFIG]) -> ANY_CONFIG:
        """The config with which the run was started."""
        return kind.from_dict(self._read_settings(), str(self.config))

    def _read_settings(self) -> dict[str, Any]:
        return read_settings(self.config, "restore it, or remove it to resume with what the checkpoints keep")

    def open(self, config: TrainConfig, resume: bool, process_group: ProcessGroup) -> Path | None:
        """Make the folder or check that `config` may go on in it; the checkpoint to go on from, if any.

        Only the first process looks and writes; the others learn what it found.
        """
        return self._broadcast(self._open(config, resume) if process_group.is_first else None, process_group)

    def newest_checkpoint(self, process_group: ProcessGroup, at_most: int | None = None) -> Path | None:
        """The newest whole one, of step `at_most`. Only the first process reads and hashes it."""
        found = newest_whole(self.checkpoints, at_most) if process_group.is_first else None
        return self._broadcast(found, process_group)

    def _broadcast(self, checkpoint: Path | None, process_group: ProcessGroup) -> Path | None:
        name = process_group.broadcast(checkpoint.name if checkpoint else None)
        return self.checkpoints / name if name else None

    def _open(self, config: TrainConfig, resume: bool) -> Path | None:
        if self.started and self.config.exists():
            self._check_same(self.read_config(type(config)), config)
        if self.started and not resume:
            raise UserError(
                f"{self.path} already holds this run; add --resume to continue it, or choose another folder"
                if self.config.exists()
                else f"{self.path} holds checkpoints of a run whose {self.config.name} is missing; add --resume "
                "to continue it, if these are its settings, or choose another folder"
            )
        make_durable(self.checkpoints)
        for folder in (self.path, self.checkpoints):
            remove_leftovers(folder)
        checkpoint = newest_whole(self.checkpoints)
        if checkpoint is None and list_checkpoints(self.checkpoints):
            raise UserError(
                f"{self.checkpoints}: every checkpoint is damaged; restore one from a backup, or delete the "
                "folder to begin again"
            )
        if checkpoint:
            self._check_seal(checkpoint, config)
        if checkpoint and step_of(checkpoint) > config.steps:
            raise UserError(
                f"{named('steps', config.steps)} is less than the {step_of(checkpoint)} that the run in "
                f"{self.path} has done; give more, or choose another folder"
            )
        atomic_write(self.config, config.to_yaml())
        return checkpoint

    def _check_same(self, before: TrainConfig, now: TrainConfig) -> None:
        done = max(map(step_of, list_checkpoints(self.checkpoints)), default=0)
        if lines := _show_difference(before, now, done):
            raise UserError(
                f"{self.path} holds a run with another config:\n{lines}\n"
                "choose another folder, or resume it with the settings it has"
            )

    def _check_seal(self, checkpoint: Path, now: TrainConfig) -> None:
        """UserError where a checkpoint was trained with other settings or data, whatever config.yaml says."""
        state = read_state(checkpoint)
        if not state.config and state.step == 0:  # no setting has decided anything
            return
        before = type(now).from_dict(state.config, f"{checkpoint / STATE_FILE}: config")
        if lines := _show_difference(before, now, state.step):
            raise UserError(
                f"{checkpoint} was trained with other settings or data than those of now:\n{lines}\n"
                f"put them back ({self.config}, the command line, the data) to continue this run, or choose "
                "another folder for a new one"
            )


@dataclass
class FolderLock:
    """The lock on a run's folder while it trains; `lock` is None on the ranks that do not write.

    Somebody may remove or move the folder, or the lock alone, and start another run of the same name. The old one
    must then write nothing more: the new one would take it for its own.
    """

    folder: Path
    lock: Lock | None
    _looked: float = 0.0

    def is_lost(self) -> bool:
        """Looks once a second at most, so that it can be asked at every step."""
        if self.lock is None or time.monotonic() < self._looked + BETWEEN_LOOKS:
            return False
        self._looked = time.monotonic()
        return self.lock.lost

    def check(self) -> None:
        """UserError if it is lost; to be called before something is written."""
        if self.lock is not None and self.lock.lost:
            raise self.error()

    def error(self) -> UserError:
        return UserError(
            f"{self.folder}: the folder or its lock ({LOCK}) was removed, moved or made anew during the run; "
            "it has stopped, and writes nothing more. If the folder still exists, put it back and add --resume; "
            "else start again"
        )


def _show_difference(before: TrainConfig, now: TrainConfig, done: int) -> str:
    """A line for each setting in which a run that has `done` so many steps cannot continue; empty if it can."""
    difference = before.difference(now, done)
    leaves = (leaf for name, (old, new) in difference.items() for leaf in differences(old, new, name))
    return "\n".join(f"  {name}: {old!r} there, {new!r} now" for name, old, new in leaves)


@contextlib.contextmanager
def disk_errors(folder: RunFolder) -> Iterator[None]:
    """Turn what the operating system refuses into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder.path}: {error}. Saved checkpoints are intact; {disk_remedy(error)}, then resume"
        ) from error
