"""Learning rates as pure functions of the step, so that resuming at any step needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable

from altup.core.errors import UserError, check_choice, check_range, check_whole

SCHEDULES = ("rsqrt", "constant", "linear", "cosine")


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
