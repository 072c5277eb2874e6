"""Settings of a training run, which check themselves; some defaults depend on other settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from altup.core.errors import MOST_EXAMPLES, MOST_SEED, UserError, check_choice, check_range, check_whole
from altup.core.hardware import TRAINING_PRECISIONS
from altup.core.schema import Settings, describe_settings, read_settings, refuse_unknown, setting

PARALLEL = ("ddp", "fsdp")
# Of a model, whose rates may differ from that of the rest: vectors are norms, biases and the like, positions the
# tables of relative ones, which have the rate of vectors unless they are named.
PARTS = ("embeddings", "head", "coefficients", "positions", "vectors")
MUON_BY = ("matrix", "head", "block")
SCHEDULES = ("rsqrt", "constant", "linear", "cosine")
SPIKES = ("ignore", "skip", "stop")
TRACKERS = ("tensorboard", "wandb", "trackio", "none")

# How each optimizer is run unless told otherwise; `lr` is the highest rate of the schedule. Muon's figures were
# measured with small models and some thousand steps (docs/lab-log.md).
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adafactor": {"schedule": "rsqrt", "lr": 0.01, "weight_decay": 0.0},
    "adamw": {"schedule": "cosine", "lr": 1e-3, "weight_decay": 0.01},
    "adamw-rms": {"schedule": "cosine", "lr": 0.02, "weight_decay": 0.0},
    "muon": {
        "schedule": "constant", "lr": 0.06, "weight_decay": 0.0, "warmup_steps": 50, "decay_fraction": 0.7,
        "lr_factors": {"embeddings": 4.0},
    },
}  # fmt: skip

# Whole recipes by one word: what is not said here is the optimizer's own, above. The paper's is T5's.
RECIPES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "paper": {"optimizer": "adafactor", "schedule": "rsqrt", "decay_fraction": 0.0},
}
# What a recipe decides, with those defaults.
OF_RECIPE = (
    *("recipe", "optimizer", "lr", "schedule", "warmup_steps", "decay_fraction", "weight_decay"),
    *("beta1", "beta2", "lr_factors", "muon_by", "muon_growth", "coefficient_growth", "coefficient_decay"),
)

LARGEST_GROWTH = 10.0  # of the size that Muon's steps are relative to; docs/lab-log.md has others
COEFFICIENT_GROWTH = 1.0  # the same for AltUp's coefficients, some of which ran away at 10
# T5s of width 256 whose embeddings' rate was settled were lost only where Muon's rate was held for longer than
# this; at a rate below the second none was.
SAFE_STEPS, SAFE_RATE = 5_500, 0.045
MANY_EPOCHS = 1_000  # after which a model has learnt its text by heart
LONG_RUN = 50_000  # steps: further than Muon's defaults were tried, and where the paper's own recipe works


@dataclass(kw_only=True)
class TrainConfig(Settings):
    """What the loop needs, whatever is trained.

    `batch_size` and `micro_batch` count the examples of all processes together: a step adds up
    `batch_size / micro_batch` forward passes, and each process takes an equal share of every one.

    A run may go on with other values of the settings that `may_change`: they say how it is run and watched. The
    weights stay the same, to the last bit or, for those of the panel "Speed" and `micro_batch`, up to the rounding
    of another order of summation.
    """

    steps: int = setting(10_000, "Updates.", panel="Training", at_least=1)
    batch_size: int = setting(
        128, "Examples a step, of all processes.", panel="Training", at_least=1, at_most=MOST_EXAMPLES
    )
    micro_batch: int | None = setting(
        None, "Examples a forward pass, of all processes.", shown="the batch",
        panel="Training", at_least=1, may_change=True,
    )  # fmt: skip
    optimizer: str | None = setting("adafactor", "{choices}.", panel="Training", choices=OPTIMIZER_DEFAULTS)
    lr: float | None = setting(
        None, "Learning rate; for rsqrt its numerator.", shown="by optimizer", panel="Training", at_least=0
    )
    schedule: str | None = setting(None, "{choices}.", shown="by optimizer", panel="Training", choices=SCHEDULES)
    warmup_steps: int | None = setting(
        None, "Steps before lr declines.", shown="by optimizer and schedule",
        panel="Training", at_least=0,
    )  # fmt: skip
    decay_fraction: float | None = setting(
        None, "Last part of the run with lr linear to 0.", shown="by optimizer and schedule",
        panel="Training", at_least=0, at_most=1,
    )  # fmt: skip
    weight_decay: float | None = setting(
        None, "Decay of matrices (not for adafactor).", shown="by optimizer", panel="Training", at_least=0
    )
    beta1: float | None = setting(
        None, "Decay of the mean gradient (adamw's β₁).", shown="0.9", panel="Training", at_least=0, below=1
    )
    beta2: float | None = setting(
        None,
        "Decay of the mean square gradient (adamw's β₂).",
        shown="0.999",
        panel="Training",
        at_least=0,
        below=1,
    )
    lr_factors: dict[str, float] = setting(
        {}, "Factor of the learning rate of {choices} (norms, biases): "
        "coefficients=0.1. Repeat it. Muon moves T5's relative positions, if named, in the unit of scores. "
        "[1, positions as vectors; with muon embeddings: 4, and in a T5 that `altup pretrain` begins with it "
        "positions: 4, vectors: 0.1]",
        panel="Training", flag="--lr-factor", choices=PARTS, at_least=0,
    )  # fmt: skip
    muon_by: str = setting(
        "matrix", "What Muon orthogonalizes at a time: {choices} (of 64 hidden units, and heads).",
        panel="Training", choices=MUON_BY,
    )  # fmt: skip
    muon_growth: float = setting(
        LARGEST_GROWTH, "Muon's steps are relative to a weight's size, up to so many times that of its start.",
        panel="Training", at_least=1,
    )  # fmt: skip
    coefficient_growth: float | None = setting(
        None, "The same for AltUp's coefficients, unless they are made from the data.",
        shown=f"{COEFFICIENT_GROWTH:g}", panel="Training", at_least=1,
    )  # fmt: skip
    coefficient_decay: float = setting(
        0.0, "Muon's decay of these coefficients to where the run began; 4 holds them within a quarter of it.",
        panel="Training", at_least=0,
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
        "ignore", "A loss spike: {choices}; to skip is to go back a checkpoint and leave out what was read since.",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro_batch is None:
            self.micro_batch = self.batch_size
        if self.batch_size % self.micro_batch:
            raise UserError(
                f"micro_batch={self.micro_batch} does not divide batch_size={self.batch_size}; "
                f"try {_nearest_divisor(self.batch_size, self.micro_batch)}"
            )
        self._fill_in_schedule()
        self.rate()
        if self.weight_decay and self.optimizer == "adafactor":
            raise UserError(
                f"weight_decay={self.weight_decay} does not go with optimizer='adafactor', which is T5's and has "
                "none; leave it at 0 or choose 'adamw'"
            )
        for name in ("beta1", "beta2"):
            if (beta := getattr(self, name)) is not None and self.optimizer == "adafactor":
                raise UserError(
                    f"{name}={beta} is for 'adamw', 'adamw-rms' and 'muon'; T5's Adafactor has no such number"
                )
        for name, usual in (
            ("muon_by", "matrix"),
            ("muon_growth", LARGEST_GROWTH),
            ("coefficient_growth", None),
            ("coefficient_decay", 0.0),
        ):
            if (value := getattr(self, name)) != usual and self.optimizer != "muon":
                raise UserError(f"{name}={value!r} is for optimizer='muon', not for {self.optimizer!r}")
        if self.precision is None:
            self.precision = "bf16" if _has_gpu() else "fp32"
        self.trackers = [tracker for tracker in self.trackers if tracker != "none"]

    @property
    def low_precision(self) -> bool:
        """Whether a run computes under autocast to bf16."""
        return self.precision != "fp32"

    def _fill_in_schedule(self) -> None:
        """Defaults that depend on the optimizer: T5's lr = 1/√max(step, 10000) for Adafactor."""
        if self.optimizer is None:
            self.optimizer = "adafactor" if self.steps > LONG_RUN else "muon"
        defaults = OPTIMIZER_DEFAULTS[self.optimizer]
        if self.schedule is None:
            self.schedule = defaults["schedule"]
        of_schedule = defaults if self.schedule == defaults["schedule"] else {}
        if self.warmup_steps is None:
            tenth = self.steps // 10
            usual = {"rsqrt": 10_000, "constant": 0}.get(self.schedule, min(1_000, tenth))
            self.warmup_steps = min(of_schedule["warmup_steps"], tenth) if "warmup_steps" in of_schedule else usual
        if self.lr is None:
            peak = self.default_lr()
            self.lr = peak * max(self.warmup_steps, 1) ** 0.5 if self.schedule == "rsqrt" else peak
        if self.decay_fraction is None:
            usual_decay = 0.0 if self.schedule in ("linear", "cosine") else 0.3
            self.decay_fraction = of_schedule.get("decay_fraction", usual_decay)
        if self.weight_decay is None:
            self.weight_decay = defaults["weight_decay"]
        self.lr_factors = {**defaults.get("lr_factors", {}), **self.lr_factors}

    def default_lr(self) -> float:
        """The highest rate, unless one is given."""
        return OPTIMIZER_DEFAULTS[str(self.optimizer)]["lr"]

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
    def resolve(cls, saved: dict[str, Any], file: Path | None, flags: dict[str, Any]) -> Self:
        """A run's config from what it was started with, a user's file, and flags; later ones win.

        What none of them says is filled in when the config is made, in this order: a recipe (pretraining), the
        optimizer's `OPTIMIZER_DEFAULTS`, what depends on the schedule. Defaults that depend on the model come from
        a subclass, here or in `of_values`.
        """
        values: dict[str, Any] = {}
        given = (
            {str(file): read_settings(file, "write `name: value` lines, or leave --config out")} if file else {}
        )
        for name, source in {"config.yaml of the run": saved, **given, "config": flags}.items():
            refuse_unknown(name, source, describe_settings(cls))
            values = cls.merge(values, source)
        values.pop("batches", None)  # the data's description, read again at every start
        values.setdefault("trackers", ["tensorboard"] if find_spec("tensorboard") else [])
        return cls.of_values(values)

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> Self:
        """The config of these settings; a subclass may have defaults that depend on the model."""
        return cls(**values)

    @classmethod
    def merge(cls, weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
        """`weak` updated with `strong`; factors of parts that `strong` does not name stay."""
        both = [values.get("lr_factors") or {} for values in (weak, strong)]
        merged = {**weak, **strong}
        if all(isinstance(factors, dict) for factors in both) and any(both):
            merged["lr_factors"] = {**both[0], **both[1]}
        return merged

    def difference(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """The fields in which a run with `other` could not go on as this one: name -> (ours, theirs).

        `steps` may change only while the learning rate does not depend on it. `on_spike` decides what is computed,
        but from now on: a run that a spike has spoiled may go on with another.
        """
        free = {*self.may_change(), "on_spike"}
        if self.schedule in ("rsqrt", "constant") and self.decay_fraction == 0 == other.decay_fraction:
            free.add("steps")
        mine, theirs = asdict(self), asdict(other)
        return {
            name: (mine[name], theirs[name]) for name in mine if name not in free and mine[name] != theirs[name]
        }


def warn_of_epochs(epochs: float) -> list[str]:
    """A line for a run that sees its data again and again."""
    if epochs < MANY_EPOCHS:
        return []
    return [
        f"warning: each example is seen {epochs:,.0f} times, so the model learns it by heart; give more data or "
        "fewer steps"
    ]


def warn_of_growth(config: TrainConfig) -> list[str]:
    """A line for a run that Muon may not bring to its end: without decay, weights grow while the rate is held."""
    held = round(config.steps * (1 - (config.decay_fraction or 0.0)))
    of_muon = config.optimizer == "muon" and config.schedule == "constant" and not config.weight_decay
    if not of_muon or held <= SAFE_STEPS or (config.lr or 0.0) < SAFE_RATE or config.muon_growth < LARGEST_GROWTH:
        return []
    return [
        f"warning: lr={config.lr:g} is held for {held:,} steps, and without weight decay Muon's weights grow all "
        f"that time; T5s of width 256 lost what they had learned after {SAFE_STEPS:,} to 8,500. Let it fall "
        "earlier (--decay-fraction 0.8: three of three came through 8,000 to 8,939), or try --weight-decay 0.02 "
        "or a lower --lr"
    ]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def build_schedule(
    name: str, *, lr: float, warmup_steps: int, total_steps: int, decay_fraction: float = 0.0
) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ..., total_steps - 1; from total_steps on it is that of the end.

    `rsqrt`     lr / √max(step, warmup_steps): T5's, with lr 1.0 and warmup_steps 10,000
    `constant`  lr
    `linear`    from lr down to 0 at total_steps
    `cosine`    the same along half a cosine

    All but rsqrt, whose start is constant, rise linearly over the first `warmup_steps` steps and reach lr at
    the last of them. `decay_fraction` f multiplies any of them by min(1, (total_steps - step) / (f·total_steps)):
    a straight way to zero over the last f of the run.
    """
    check_choice("schedule", name, SCHEDULES)
    check_range("lr", lr, 0, math.inf)
    check_whole("warmup_steps", warmup_steps, 1 if name == "rsqrt" else 0)
    check_whole("total_steps", total_steps, 1)
    if not 0 <= decay_fraction <= 1:
        raise UserError(f"decay_fraction={decay_fraction!r} makes no sense; give a number from 0 to 1")
    if name in ("linear", "cosine") and warmup_steps >= total_steps:
        raise UserError(
            f"warmup_steps={warmup_steps} leaves no step of total_steps={total_steps} for the {name} schedule; "
            "give fewer warmup_steps"
        )

    def shape(step: int) -> float:
        if name == "rsqrt":
            return 1 / math.sqrt(max(step, warmup_steps))
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant":
            return 1.0
        left = (total_steps - step) / (total_steps - warmup_steps)
        return left if name == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)

    def schedule(step: int) -> float:
        step = min(step, total_steps)
        left = total_steps - step
        decay_steps = decay_fraction * total_steps
        return lr * shape(step) * (left / decay_steps if left < decay_steps else 1.0)

    return schedule
