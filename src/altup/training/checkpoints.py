"""Checkpoints, from the step to the disk and back: they are atomic, and their hashes show later damage.

`save_checkpoint` gathers the weights and the optimizer of all ranks; the first rank, or of a sharded model every
rank, writes them into a folder that is renamed to `step-N` when it is whole (`sealed_folders.py`). `newest_whole`
finds what to resume from, and `read_state` and `restore` put it back.

A checkpoint is a Hugging Face model folder with the optimizer and the loop's state beside it. Tensors are stored
as safetensors, all else as JSON: no file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from altup.core.errors import UserError, check_whole
from altup.core.runs import list_checkpoints, newest_whole, step_of
from altup.core.schema import describe_kind, fits
from altup.core.sealed_folders import (
    MANIFEST,
    UNFINISHED,
    atomic_folder,
    begin_folder,
    damage,
    load_json,
    remove,
    remove_leftovers,
    rename_over,
    save_errors,
    save_json,
    seal,
)
from altup.core.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from altup.training.engine import Engine

STATE_FILE = "training_state.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"

Best = dict[str, Any]  # {"step": of a checkpoint, "score": its score}


@dataclass
class TrainingState:
    """What a checkpoint knows beside weights and optimizer.

    `meter` holds the sums since the last log, `evaluation` the latest one, `best` the checkpoint with the highest
    score and `best_of` that of each other number; `yardstick` says what the scores were measured on. A checkpoint
    that was saved before its evaluation has `evaluation_due`. `config` is the seal: the settings and the
    description of the data that the weights come from, whatever config.yaml says later; `records` is how many
    metrics.jsonl held.

    With `on_spike: skip`, `recent` are the losses of the last records, and `left_out` the batches that spikes
    cost: `{"step": from where, "batches": how many, …}`.
    """

    step: int = 0
    best: Best | None = None
    best_of: dict[str, Best | None] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    yardstick: str | None = None
    evaluation_due: bool = False
    meter: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    records: int = 0
    recent: list[float] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def choose_best(self, score: Callable[[dict[str, float]], float], also: Sequence[str] = ()) -> None:
        """A checkpoint is the best if it was just measured and its score is the highest so far."""
        measured = self.evaluation
        if not measured or measured["step"] != self.step:
            return
        self.best = _better(self.best, self.step, score(measured))
        self.best_of = {name: _better(self.best_of.get(name), self.step, measured[name]) for name in also}

    @property
    def best_checkpoints(self) -> list[str]:
        return [f"step-{best['step']}" for best in (self.best, *self.best_of.values()) if best]


def _better(best: Best | None, step: int, score: float) -> Best | None:
    return {"step": step, "score": score} if math.isfinite(score) and (not best or score > best["score"]) else best


def save_checkpoint(engine: Engine, folder: Path, tokenizer: Any, state: TrainingState) -> None:
    """Make the checkpoint `folder/step-N`. Every rank takes part in gathering; the first one writes, or, of a
    sharded model, every rank a part."""
    from altup.training.optimizers.state import named_state, state_tensors
    from altup.training.parallel import gather
    from altup.training.sharded import MODEL, OPTIMIZER, is_sharded, weights_of, write_parts

    process_group = engine.process_group
    if is_sharded(engine.plain):
        tensors = {MODEL: weights_of(engine.plain), OPTIMIZER: dict(named_state(engine.optimizer, engine.plain))}
        with _folder_of_parts(engine, folder / f"step-{state.step}", tokenizer, state) as parts:
            for stem in tensors:
                parts.written |= write_parts(tensors[stem], parts.folder, stem, process_group)
        return
    weights = gather(engine.plain.state_dict(), process_group)
    moments = state_tensors(engine.optimizer, engine.plain, keep=process_group.is_first)

    def write(path: Path) -> None:
        _write_model(engine, path, tokenizer, weights)
        save_tensors(path / OPTIMIZER_FILE, moments)
        save_json(path / STATE_FILE, asdict(state))

    if process_group.is_first:
        atomic_folder(folder, f"step-{state.step}", write)
    process_group.barrier()


def save_final(engine: Engine, target: Path, tokenizer: Any) -> None:
    """Make `target`, the model and its tokenizer alone. Every rank takes part, as above."""
    from altup.training.parallel import gather
    from altup.training.sharded import MODEL, is_sharded, weights_of, write_parts

    if is_sharded(engine.plain):
        with _folder_of_parts(engine, target, tokenizer) as parts:
            parts.written |= write_parts(weights_of(engine.plain), parts.folder, MODEL, engine.process_group)
        return
    weights = gather(engine.plain.state_dict(), engine.process_group)
    if engine.process_group.is_first:
        atomic_folder(target.parent, target.name, lambda path: _write_model(engine, path, tokenizer, weights))
    engine.process_group.barrier()


def _write_model(engine: Engine, path: Path, tokenizer: Any, weights: dict[str, Tensor]) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    engine.plain.save_pretrained(path, state_dict=weights)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


@dataclass
class _Parts:
    """A folder that all ranks write to, and the sizes and hashes of this rank's files."""

    folder: Path
    written: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def _folder_of_parts(
    engine: Engine, target: Path, tokenizer: Any, state: TrainingState | None = None
) -> Iterator[_Parts]:
    """As `atomic_folder`, of a model's files without the tensors, which every rank adds to the temporary folder.

    It gets its name once all ranks have flushed theirs; if one fails, all do.
    """
    process_group = engine.process_group
    parts = _Parts(target.with_name(f"{UNFINISHED}{target.name}"))
    try:
        with process_group.together(), save_errors(target):
            if process_group.is_first:
                begin_folder(target)
                _write_model(engine, parts.folder, tokenizer, {})
                (parts.folder / MODEL_FILE).unlink(missing_ok=True)  # of no weights
                if state:
                    save_json(parts.folder / STATE_FILE, asdict(state))
        with process_group.together(), save_errors(target):
            yield parts
        written = [json.loads(text) for text in process_group.all_gather(json.dumps(parts.written))]
        with process_group.together(), save_errors(target):
            if process_group.is_first:
                seal(parts.folder, {name: entry for entries in written for name, entry in entries.items()})
                rename_over(target, parts.folder)
    except BaseException:
        if process_group.is_first:
            with contextlib.suppress(OSError):
                remove_leftovers(target.parent)
        raise


def read_state(checkpoint: Path) -> TrainingState:
    """The state of a checkpoint; UserError where it is none, or that of another step."""
    path = checkpoint / STATE_FILE
    found, kinds = load_json(path), get_type_hints(TrainingState)
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise UserError(f"{path} holds no state of a run; resume from another checkpoint")
    for name, kind in kinds.items():
        if not fits(found[name], kind):
            shown = shorten(repr(found[name]), 80)
            raise UserError(
                f"{path}: {name}={shown} must be {describe_kind(kind)}; resume from another checkpoint"
            )
    state = TrainingState(**found)
    if state.step != step_of(checkpoint):
        raise UserError(f"{path} is of step {state.step:,}; resume from another checkpoint")
    return state


def replace_state(checkpoint: Path, state: TrainingState) -> None:
    """Give a checkpoint another state; its weights and optimizer are linked, not written again."""

    def write(path: Path) -> None:
        shutil.copytree(checkpoint, path, copy_function=_link, dirs_exist_ok=True)
        for name in (STATE_FILE, MANIFEST):
            (path / name).unlink()
        save_json(path / STATE_FILE, asdict(state))

    atomic_folder(checkpoint.parent, checkpoint.name, write)


def _link(source: str, target: str) -> None:
    """The same file under another name; a copy where a file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def restore(engine: Engine, checkpoint: Path, state: TrainingState) -> None:
    """Put a checkpoint's optimizer and sums into an engine that was built with its model."""
    from altup.training.optimizers.state import load_state_tensors
    from altup.training.sharded import OPTIMIZER
    from altup.training.tensor_files import TensorFiles

    load_state_tensors(engine.optimizer, engine.plain, TensorFiles(checkpoint, OPTIMIZER))
    engine.meter.restore(state.meter, engine.process_group)


def final_damage(final: Path, last: Path) -> str | None:
    """What is wrong with a run's final model, which must be that of its last checkpoint; None if nothing is."""

    def weights(folder: Path) -> dict[str, Any]:
        sums = load_json(folder / MANIFEST)
        return {path: entry["sha256"] for path, entry in sums.items() if path.startswith("model")}

    if not final.is_dir():
        return "it is missing"
    if wrong := damage(final):
        return wrong
    ours, theirs = weights(final), weights(last)
    same = ours == theirs if ours.keys() == theirs.keys() else _same_tensors(final, last)
    return None if same else f"it is not the model of {last.name}"


def _same_tensors(one: Path, other: Path) -> bool:
    """Whether two folders, written by different numbers of ranks, hold the same weights."""
    from altup.training.sharded import MODEL
    from altup.training.tensor_files import TensorFiles

    ours, theirs = TensorFiles(one, MODEL), TensorFiles(other, MODEL)
    return ours.keys() == theirs.keys() and all(ours[n][...].equal(theirs[n][...]) for n in ours)


def prune(folder: Path, keep_last: int, keep: Collection[str] = ()) -> list[str]:
    """Remove all but the last `keep_last` checkpoints, those named in `keep` (the best, say) and, should all of
    these be damaged, the newest whole one. Gives the names that were removed."""
    check_whole("keep_last", keep_last, 1)
    spare = [path for path in list_checkpoints(folder)[:-keep_last] if path.name not in keep]
    if not spare:
        return []
    whole = newest_whole(folder)
    removed = [path for path in spare if path != whole]
    for path in removed:
        remove(path)
    return [path.name for path in removed]


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
