"""Settings of an optimizer and of its learning rate; `build_optimizer` makes the optimizer from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from altup.core.errors import MOST_STEPS, UserError, check_choice, check_range, check_whole, named
from altup.core.schema import Settings, setting

# Parts of a model whose rates may differ from that of the rest: vectors are norms, biases and the like, positions
# the tables of relative ones, which have the rate of vectors unless they are named.
PARTS = ("embeddings", "head", "coefficients", "positions", "vectors")
MUON_BY = ("matrix", "head", "block")
SCHEDULES = ("rsqrt", "constant", "linear", "cosine")

# How each optimizer is run by default; `lr` is the highest rate of the schedule. Muon's values were measured with
# small models and some thousand steps.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adafactor": {"schedule": "rsqrt", "lr": 0.01, "weight_decay": 0.0},
    "adamw": {"schedule": "cosine", "lr": 1e-3, "weight_decay": 0.01},
    "adamw-rms": {"schedule": "cosine", "lr": 0.02, "weight_decay": 0.0},
    "muon": {
        "schedule": "constant", "lr": 0.06, "weight_decay": 0.0, "warmup_steps": 50, "decay_fraction": 0.7,
        "lr_factors": {"embeddings": 4.0},
    },
}  # fmt: skip
LARGEST_GROWTH = 10.0  # of the size that Muon's steps are relative to
COEFFICIENT_GROWTH = 1.0  # the same for AltUp's coefficients
# Settings of one optimizer alone, with the values that they have with all others.
ONLY_MUON = {
    "muon_by": "matrix",
    "muon_growth": LARGEST_GROWTH,
    "coefficient_growth": None,
    "coefficient_decay": 0.0,
}


@dataclass(kw_only=True)
class OptimizerConfig(Settings):
    """An optimizer, the parts of a model that learn at other rates, and the rate of every step.

    What is not set is completed from the optimizer's `OPTIMIZER_DEFAULTS` and from the schedule.
    """

    steps: int = setting(10_000, "Updates.", panel="Training", at_least=1, at_most=MOST_STEPS)
    optimizer: str | None = setting("adafactor", "{choices}.", panel="Training", choices=OPTIMIZER_DEFAULTS)
    lr: float | None = setting(
        None, "Learning rate; for rsqrt its numerator.", shown="by optimizer", panel="Training", at_least=0
    )
    schedule: str | None = setting(None, "{choices}.", shown="by optimizer", panel="Training", choices=SCHEDULES)
    warmup_steps: int | None = setting(
        None, "Steps before lr declines.", shown="by optimizer and schedule", panel="Training", at_least=0
    )
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
        None, "Decay of the mean square gradient (adamw's β₂).", shown="0.999",
        panel="Training", at_least=0, below=1,
    )  # fmt: skip
    lr_factors: dict[str, float] = setting(
        {}, "Factor of the learning rate of {choices} (norms, biases): coefficients=0.1. Repeat it. For "
        "positions, Muon's step is lr × factor, in logit units. [1, positions as vectors; muon: embeddings 4, "
        "in a new T5 also positions 4 and vectors 0.1]",
        panel="Training", flag="--lr-factor", choices=PARTS, at_least=0,
    )  # fmt: skip
    muon_by: str = setting(
        "matrix", "What Muon orthogonalizes at a time: {choices} (of 64 hidden units, and heads).",
        panel="Training", choices=MUON_BY,
    )  # fmt: skip
    muon_growth: float = setting(
        LARGEST_GROWTH, "Muon's steps are relative to a weight's size, up to this multiple of its initial size.",
        panel="Training", at_least=1,
    )  # fmt: skip
    coefficient_growth: float | None = setting(
        None, "The same for AltUp's coefficients, unless they are made from the data.",
        shown=f"{COEFFICIENT_GROWTH:g}", panel="Training", at_least=1,
    )  # fmt: skip
    coefficient_decay: float = setting(
        0.0, "Muon's decay of these coefficients to their initial values; 4 holds them within a quarter of them.",
        panel="Training", at_least=0,
    )  # fmt: skip

    def defaults(self) -> dict[str, Any]:
        """What the settings are that nobody set; a subclass may know more of the model."""
        return OPTIMIZER_DEFAULTS[str(self.optimizer)]

    def complete(self) -> None:
        """Fill in what depends on the optimizer and the schedule, and refuse what does not go together."""
        defaults = self.defaults()
        if self.schedule is None:
            self.schedule = defaults["schedule"]
        of_schedule = defaults if self.schedule == defaults["schedule"] else {}
        if self.warmup_steps is None:
            tenth = self.steps // 10
            usual = {"rsqrt": 10_000, "constant": 0}.get(str(self.schedule), min(1_000, tenth))
            self.warmup_steps = min(of_schedule["warmup_steps"], tenth) if "warmup_steps" in of_schedule else usual
        if self.lr is None:
            numerator = max(self.warmup_steps, 1) ** 0.5 if self.schedule == "rsqrt" else 1.0
            self.lr = defaults["lr"] * numerator
        if self.decay_fraction is None:
            usual_decay = 0.0 if self.schedule in ("linear", "cosine") else 0.3
            self.decay_fraction = of_schedule.get("decay_fraction", usual_decay)
        if self.weight_decay is None:
            self.weight_decay = defaults["weight_decay"]
        self.lr_factors = {**defaults.get("lr_factors", {}), **self.lr_factors}
        self.rate()
        self._refuse_settings_of_others()

    def _refuse_settings_of_others(self) -> None:
        if self.optimizer == "adafactor":
            if self.weight_decay:
                raise UserError(
                    f"{named('weight_decay', self.weight_decay)} does not go with "
                    f"{named('optimizer', self.optimizer)}, which is T5's and has none; keep it at 0 or choose "
                    "'adamw'"
                )
            for name in ("beta1", "beta2"):
                if (beta := getattr(self, name)) is not None:
                    raise UserError(
                        f"{named(name, beta)} is for 'adamw', 'adamw-rms' and 'muon'; T5's Adafactor has no such "
                        "number"
                    )
        for name, usual in ONLY_MUON.items():
            if (value := getattr(self, name)) != usual and self.optimizer != "muon":
                raise UserError(f"{named(name, value)} is for optimizer='muon', not for {self.optimizer!r}")

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
            steps=self.steps,
            decay_fraction=self.decay_fraction,
        )


def build_schedule(
    name: str, *, lr: float, warmup_steps: int, steps: int, decay_fraction: float = 0.0
) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ..., steps - 1; from `steps` on it is that of the end.

    `rsqrt`     lr / √max(step, warmup_steps): T5's, with lr 1.0 and warmup_steps 10,000
    `constant`  lr
    `linear`    from lr down to 0 at the end
    `cosine`    the same along half a cosine

    All but rsqrt, whose start is constant, rise linearly over the first `warmup_steps` steps and reach lr at
    the last of them. `decay_fraction` f multiplies any of them by min(1, (steps - step) / (f·steps)):
    a straight way to zero over the last f of the run.
    """
    check_choice("schedule", name, SCHEDULES)
    check_range("lr", lr, 0, math.inf)
    check_whole("warmup_steps", warmup_steps, 1 if name == "rsqrt" else 0)
    check_whole("steps", steps, 1)
    if not 0 <= decay_fraction <= 1:
        raise UserError(f"{named('decay_fraction', decay_fraction)} makes no sense; give a number from 0 to 1")
    if name in ("linear", "cosine") and warmup_steps >= steps:
        raise UserError(
            f"{named('warmup_steps', warmup_steps)} leaves no step of {named('steps', steps)} for the {name} "
            "schedule; give fewer"
        )

    def shape(step: int) -> float:
        if name == "rsqrt":
            return 1 / math.sqrt(max(step, warmup_steps))
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant":
            return 1.0
        remaining = (steps - step) / (steps - warmup_steps)
        return remaining if name == "linear" else 0.5 - 0.5 * math.cos(math.pi * remaining)

    def schedule(step: int) -> float:
        step = min(step, steps)
        remaining, decay_steps = steps - step, decay_fraction * steps
        return lr * shape(step) * (remaining / decay_steps if remaining < decay_steps else 1.0)

    return schedule
