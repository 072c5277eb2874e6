"""What a fine-tuning run is told; the defaults are the paper's recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from altup.core.errors import UserError, check_choice, check_range, check_whole
from altup.data.tasks.task import INPUTS_LENGTH, TARGETS_LENGTH
from altup.training.config import TrainConfig


@dataclass(kw_only=True)
class FinetuneConfig(TrainConfig):
    """A model, tasks, their data, and how to train: Adafactor at a constant 1e-3, dropout 0.1, batch 256.

    `model` is a run, a model folder or a name on the hub. `tasks` holds names of tasks or suites, or a user's own
    files, each with a weight (`squad=2`) or none of them. `data` is a folder of task files; None is the hub.
    `pack` puts several examples into a row; models with strided or pooled sequences would mix them, and pad.
    A checkpoint is saved with every evaluation unless `save_every` says otherwise, so that the best can be kept.
    `batches` is what the data says of itself, filled in at the start and compared when a run goes on.
    """

    model: str = ""
    tasks: list[str] = field(default_factory=list)
    data: str | None = None
    steps: int = 50_000
    batch_size: int = 256
    lr: float | None = 1e-3
    schedule: str | None = "constant"
    decay_fraction: float | None = 0.0
    dropout: float = 0.1
    z_loss: float = 1e-4
    inputs_length: int = INPUTS_LENGTH
    targets_length: int = TARGETS_LENGTH
    pack: bool = True
    eval_every: int = 1_000
    save_every: int | None = None  # type: ignore[assignment]
    eval_batch_size: int = 128
    eval_limit: int | None = None
    on_error: str = "stop"
    batches: dict[str, Any] = field(default_factory=dict)

    SHAPES_VARY: ClassVar[bool] = True

    # The data may be moved: what counts is what `batches` says of its contents.
    MAY_CHANGE: ClassVar[frozenset[str]] = TrainConfig.MAY_CHANGE | {
        "data",
        "pack",
        "eval_batch_size",
        "eval_limit",
    }

    def __post_init__(self) -> None:
        if self.save_every is None:
            self.save_every = self.eval_every
        super().__post_init__()
        if not self.model:
            raise UserError("model is not set; give a run, a model folder or a name on the hub")
        if not self.tasks or not all(isinstance(name, str) for name in self.tasks):
            raise UserError(f"tasks={self.tasks!r}; give names: --task squad, --suite glue, --task my.jsonl")
        check_range("dropout", self.dropout, 0, 1)
        check_range("z_loss", self.z_loss, 0, float("inf"))
        check_whole("inputs_length", self.inputs_length, 2)
        check_whole("targets_length", self.targets_length, 2)
        check_whole("eval_batch_size", self.eval_batch_size, 1)
        if self.eval_limit is not None:
            check_whole("eval_limit", self.eval_limit, 1)
        check_choice("on_error", self.on_error, ("skip", "stop"))
        self.weighted_names()

    def weighted_names(self) -> list[tuple[str, float | None]]:
        """`["squad=2", "glue"]` → [("squad", 2.0), ("glue", None)]."""
        return [_read_weight(entry) for entry in self.tasks]


def _read_weight(entry: str) -> tuple[str, float | None]:
    name, equals, text = entry.rpartition("=")
    if not equals:
        return entry, None
    try:
        weight = float(text)
    except ValueError:
        return entry, None
    if not 0 < weight < float("inf"):
        raise UserError(f"task {entry!r}: a weight must be more than 0")
    return name, weight
