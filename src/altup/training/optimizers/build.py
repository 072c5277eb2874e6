"""An optimizer by its name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from altup.core.errors import UserError, check_choice, check_range
from altup.training.optimizers.adafactor import Adafactor
from altup.training.optimizers.adamw import AdamW, RelativeAdamW
from altup.training.optimizers.sharding import kind

OPTIMIZERS = ("adafactor", "adamw", "adamw-rms")


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, but not to the coefficients of an update rule."""
    return parameter.ndim >= 2 and ".rule." not in f".{name}"


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """The optimizer `name` over the parameters of `model` that ask for gradients.

    `optimizer.step(skip=flag)` leaves every weight and all state as they are where the bool tensor `flag`, on
    the parameters' device, is true; the host never waits for it. Write the learning rate of a step into
    `group["lr"]`, as a float or a 0-dim tensor. Shard the model (`fully_shard`) before this call.
    """
    check_choice("optimizer", name, OPTIMIZERS)
    check_range("weight_decay", weight_decay, 0, float("inf"))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UserError("the model has no parameter that asks for gradients; nothing to optimize")
    if name == "adafactor":
        if weight_decay:
            raise UserError(
                f"weight_decay={weight_decay} does not go with optimizer='adafactor', which is T5's and has none; "
                "leave it at 0 or choose 'adamw'"
            )
        return Adafactor(named.values(), lr=lr)
    groups = defaultdict(list)
    for n, p in named.items():
        groups[decays(n, p), kind(p).sharding].append(p)
    adamw: Any = AdamW if name == "adamw" else RelativeAdamW
    return adamw(
        [{"params": ps, "weight_decay": weight_decay * decay} for (decay, _), ps in groups.items()],
        lr=lr,
        betas=(0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2),
        eps=eps,
    )
