"""Settings of a training run, which check themselves; some defaults depend on other settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from altup.core.errors import MOST_EXAMPLES, MOST_SEED, UserError, named
from altup.core.hardware import TRAINING_PRECISIONS
from altup.core.schema import describe_settings, read_settings, refuse_unknown, setting
from altup.training.optimizers.config import OptimizerConfig

PARALLEL = ("ddp", "fsdp")
SPIKES = ("ignore", "skip", "stop")
TRACKERS = ("tensorboard", "wandb", "trackio", "none")
MANY_EPOCHS = 1_000  # after which a model has learnt its text by heart


@dataclass(kw_only=True)
class TrainConfig(OptimizerConfig):
    """What the loop needs, whatever is trained.

    `batch_size` and `micro_batch` count the examples of all processes together: a step adds up
    `batch_size / micro_batch` forward passes, and each process takes an equal share of every one.

    A resumed run may have other values of the settings that `may_change`: they say how it is run and watched. The
    weights stay the same, to the last bit or, for those of the panel "Speed" and `micro_batch`, up to the rounding
    of another order of summation.
    """

    batch_size: int = setting(
        128, "Examples a step, of all processes.", panel="Training", after="steps",
        at_least=1, at_most=MOST_EXAMPLES,
    )  # fmt: skip
    micro_batch: int | None = setting(
        None, "Examples a forward pass, of all processes.", shown="the batch",
        panel="Training", after="batch_size", at_least=1, may_change=True,
    )  # fmt: skip
    clip_norm: float | None = setting(
        None, "Bound of the gradient's norm.", shown="none", panel="Training", above=0
    )
    precision: str | None = setting(
        None, "bf16 (float32 masters), fp8 (bf16, but the layers' products in 8 bits) or fp32.",
        shown="bf16 on GPUs, else fp32", panel="Speed", choices=TRAINING_PRECISIONS,
    )  # fmt: skip
    compile: bool = setting(True, "torch.compile on GPUs.", panel="Speed", may_change=True)
    activation_checkpointing: bool = setting(False, "Less memory, more time.", panel="Speed", may_change=True)
    deterministic: bool = setting(False, "The same bits every time.", panel="Speed", may_change=True)
    parallel: str = setting(
        "ddp", "{choices}, for several processes (torchrun).", panel="Speed", choices=PARALLEL, may_change=True
    )
    seed: int = setting(0, "Seed of weights, data order and dropout.", panel="Run", at_least=0, at_most=MOST_SEED)
    max_skipped: int = setting(
        20, "Steps in a row with gradients that are not finite, before the run stops.", at_least=1, may_change=True
    )
    on_spike: str = setting(
        "ignore", "A loss spike: {choices}; skip: roll back to the last checkpoint and drop the batches since.",
        panel="Training", choices=SPIKES,
    )  # fmt: skip
    watchdog: float = setting(
        15.0, "Minutes without a finished step, before the run ends with exit code 75; 0: never.",
        panel="Watching", at_least=0, may_change=True,
    )  # fmt: skip
    log_every: int = setting(50, "Steps between records.", panel="Watching", at_least=1, may_change=True)
    eval_every: int = setting(500, "Steps between evaluations.", panel="Watching", at_least=1, may_change=True)
    save_every: int = setting(1_000, "Steps between checkpoints.", panel="Watching", at_least=1, may_change=True)
    keep_last: int = setting(2, "Newest checkpoints to keep.", panel="Watching", at_least=1, may_change=True)
    keep_best: bool = setting(True, "Keep the best one too.", panel="Watching", may_change=True)
    trackers: list[str] = setting(
        [], "tensorboard (default if installed), wandb, trackio or none. Repeat it.",
        panel="Run", flag="--track", choices=TRACKERS, may_change=True,
    )  # fmt: skip

    SHAPES_VARY: ClassVar[bool] = False  # from step to step

    def complete(self) -> None:
        if self.micro_batch is None:
            self.micro_batch = self.batch_size
        if self.batch_size % self.micro_batch:
            raise UserError(
                f"{named('micro_batch', self.micro_batch)} does not divide "
                f"{named('batch_size', self.batch_size)}; try "
                f"{_nearest_divisor(self.batch_size, self.micro_batch)}"
            )
        super().complete()
        if self.precision is None:
            self.precision = "bf16" if _has_gpu() else "fp32"
        if not self.trackers:
            self.trackers = ["tensorboard"] if find_spec("tensorboard") else ["none"]

    @property
    def low_precision(self) -> bool:
        """Whether a run computes under autocast to bf16."""
        return self.precision != "fp32"

    @classmethod
    def resolve(cls, saved: dict[str, Any], file: Path | None, flags: dict[str, Any]) -> Self:
        """A run's config from what it was started with, a user's file, and flags; later ones win."""
        values: dict[str, Any] = {}
        given = {str(file): read_settings(file, "write `name: value` lines, or remove --config")} if file else {}
        for name, source in {"config.yaml of the run": saved, **given, "config": flags}.items():
            refuse_unknown(name, source, describe_settings(cls))
            values = cls.merge(values, source)
        values.pop("batches", None)  # the data's description, read again at every start
        return cls(**values)

    @classmethod
    def merge(cls, weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
        """`weak` updated with `strong`; factors of parts that `strong` does not name stay."""
        both = [values.get("lr_factors") or {} for values in (weak, strong)]
        merged = {**weak, **strong}
        if all(isinstance(factors, dict) for factors in both) and any(both):
            merged["lr_factors"] = {**both[0], **both[1]}
        return merged

    def difference(self, other: Self, done: int = 0) -> dict[str, tuple[Any, Any]]:
        """The fields in which a run with `other` could not continue this one: name -> (before, now).

        `steps` may change while the learning rate does not depend on it, and once the run has `done` them all.
        `on_spike` decides what is computed, but from now on: you may set it when resuming after a spike.
        """
        free = {*self.may_change(), "on_spike"}
        if done >= self.steps:
            free.add("steps")
        if self.schedule in ("rsqrt", "constant") and self.decay_fraction == 0 == other.decay_fraction:
            free.add("steps")
        before, now = asdict(self), asdict(other)
        return {
            name: (before[name], now[name]) for name in before if name not in free and before[name] != now[name]
        }


def warn_of_epochs(epochs: float) -> list[str]:
    """A line for a run that sees its data again and again."""
    if epochs < MANY_EPOCHS:
        return []
    return [
        f"warning: each example is seen {epochs:,.0f} times, so the model learns it by heart; give more data or "
        "fewer steps"
    ]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
