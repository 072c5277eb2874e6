"""What a training run is told: plain dataclasses that validate themselves, read from and written to YAML."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from altup.core.errors import UserError, check_choice, check_range, check_whole
from altup.training.schedules import SCHEDULES, build_schedule

PRECISIONS = ("bf16", "fp32")
PARALLEL = ("ddp", "fsdp")
PARTS = ("embeddings", "head", "coefficients")  # of a model whose rates may differ from that of the rest


# How each optimizer is run unless told otherwise; `lr` is the highest rate of the schedule.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adafactor": {"schedule": "rsqrt", "lr": 0.01, "weight_decay": 0.0},
    "adamw": {"schedule": "cosine", "lr": 1e-3, "weight_decay": 0.01},
    "adamw-rms": {"schedule": "cosine", "lr": 0.02, "weight_decay": 0.0},
    "muon": {"schedule": "linear", "lr": 0.06, "weight_decay": 0.0},
}


@dataclass(kw_only=True)
class TrainConfig:
    """What the loop needs, whatever is trained.

    `batch_size` and `micro_batch` count the examples of all processes together: a step adds up
    `batch_size / micro_batch` forward passes, and each process takes an equal share of every one.
    """

    steps: int = 10_000
    batch_size: int = 128
    micro_batch: int | None = None
    optimizer: str = "adafactor"
    lr: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    decay_fraction: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    lr_factors: dict[str, float] = field(default_factory=dict)
    clip_norm: float | None = None
    precision: str | None = None
    compile: bool = True
    activation_checkpointing: bool = False
    deterministic: bool = False
    parallel: str = "ddp"
    seed: int = 0
    max_skipped: int = 20
    log_every: int = 50
    eval_every: int = 500
    save_every: int = 1_000
    keep_last: int = 2
    keep_best: bool = True
    trackers: list[str] = field(default_factory=list)

    SHAPES_VARY: ClassVar[bool] = False  # from step to step

    # Fields that may differ when a run goes on: they change how it is run and watched. The weights stay the
    # same, to the last bit or, for the first line, up to the rounding of another order of summation.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {"micro_batch", "parallel", "compile", "activation_checkpointing", "deterministic"}
        | {"log_every", "eval_every", "save_every", "keep_last", "keep_best", "max_skipped", "trackers"}
    )

    def __post_init__(self) -> None:
        _check_types(self)
        check_whole("steps", self.steps, 1)
        check_whole("batch_size", self.batch_size, 1)
        if self.micro_batch is None:
            self.micro_batch = self.batch_size
        check_whole("micro_batch", self.micro_batch, 1)
        if self.batch_size % self.micro_batch:
            raise UserError(
                f"micro_batch={self.micro_batch} does not divide batch_size={self.batch_size}; "
                f"try {_nearest_divisor(self.batch_size, self.micro_batch)}"
            )
        check_choice("optimizer", self.optimizer, OPTIMIZER_DEFAULTS)
        self._fill_in_schedule()
        check_range("lr", self.lr, 0, float("inf"))
        self.rate()
        check_range("weight_decay", self.weight_decay, 0, float("inf"))
        if self.weight_decay and self.optimizer == "adafactor":
            raise UserError(
                f"weight_decay={self.weight_decay} does not go with optimizer='adafactor', which is T5's and has "
                "none; leave it at 0 or choose 'adamw'"
            )
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            if beta is None:
                continue
            if self.optimizer == "adafactor":
                raise UserError(f"{name}={beta} is for 'adamw' and 'adamw-rms'; T5's Adafactor has no such number")
            if not 0 <= beta < 1:
                raise UserError(f"{name}={beta} makes no sense; give a number from 0 up to, not including, 1")
        for part, factor in self.lr_factors.items():
            check_choice("lr_factors", part, PARTS)
            check_range(f"lr_factors: {part}", factor, 0, float("inf"))
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm={self.clip_norm!r} must be more than 0; leave it out to clip nothing")
        if self.precision is None:
            self.precision = "bf16" if _has_gpu() else "fp32"
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("parallel", self.parallel, PARALLEL)
        check_whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise UserError(f"seed={self.seed} is too large; give a whole number below 2**63")
        for name in ("max_skipped", "log_every", "eval_every", "save_every", "keep_last"):
            check_whole(name, getattr(self, name), 1)
        for tracker in self.trackers:
            check_choice("trackers", tracker, ("tensorboard", "wandb", "trackio", "none"))
        self.trackers = [tracker for tracker in self.trackers if tracker != "none"]

    def _fill_in_schedule(self) -> None:
        """Defaults that depend on the optimizer: T5's lr = 1/√max(step, 10000) for Adafactor."""
        defaults = OPTIMIZER_DEFAULTS[self.optimizer]
        if self.schedule is None:
            self.schedule = defaults["schedule"]
        check_choice("schedule", self.schedule, SCHEDULES)
        decays_by_itself = self.schedule in ("linear", "cosine")
        if self.warmup_steps is None:
            self.warmup_steps = {"rsqrt": 10_000, "constant": 0}.get(self.schedule, min(1_000, self.steps // 10))
        check_whole("warmup_steps", self.warmup_steps, 0)
        if self.lr is None:
            peak = defaults["lr"]
            self.lr = peak * max(self.warmup_steps, 1) ** 0.5 if self.schedule == "rsqrt" else peak
        if self.decay_fraction is None:
            self.decay_fraction = 0.0 if decays_by_itself else 0.3
        if self.weight_decay is None:
            self.weight_decay = defaults["weight_decay"]

    def rate(self) -> Callable[[int], float]:
        """The learning rate of each step."""
        assert self.schedule is not None
        assert self.lr is not None
        assert self.warmup_steps is not None
        assert self.decay_fraction is not None
        return build_schedule(
            self.schedule,
            lr=self.lr,
            warmup_steps=self.warmup_steps,
            total_steps=self.steps,
            decay_fraction=self.decay_fraction,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str) -> Self:
        """A config from the names of its fields; an unknown name is refused with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise UserError(f"{source}: unknown key {name!r}; {hint}")
        return cls(**values)

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)

    def difference(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """The fields in which a run with `other` could not go on as this one: name -> (ours, theirs).

        `steps` may change only while the learning rate does not depend on it.
        """
        free = set(self.MAY_CHANGE)
        if self.schedule in ("rsqrt", "constant") and self.decay_fraction == 0 == other.decay_fraction:
            free.add("steps")
        mine, theirs = asdict(self), asdict(other)
        return {
            name: (mine[name], theirs[name]) for name in mine if name not in free and mine[name] != theirs[name]
        }


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with clear errors for what is not one."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `name: value` lines, found a {type(values).__name__}")
    return values


def _check_types(config: TrainConfig) -> None:
    """YAML and Python callers can pass anything: compare each value with its field's declared type."""
    hints = typing.get_type_hints(type(config))
    for f in fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        allowed = tuple(typing.get_origin(choice) or choice for choice in choices)
        if float in allowed and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, f.name, float(value))
            continue
        if float in allowed and isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
            try:
                setattr(config, f.name, float(value))
                continue
            except ValueError:
                pass
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed)
            raise UserError(f"{f.name}={value!r} is of the wrong kind; give {names}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
