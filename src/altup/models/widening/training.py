"""Training a widened model elsewhere: rates for its coefficients, in any optimizer and under Trainer."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from altup.core.errors import check_range
from altup.models.widening.card import write_card
from altup.models.widening.parameters import WideningPlan
from altup.nn import coefficient_names

COEFFICIENT_RATE = 0.01  # at most
LARGEST_FACTOR = 10.0  # over the rate of the weights; 100 does harm: docs/widen.md


def factor_for(lr: float) -> float:
    """Ten, or what brings the rate of the coefficients to 0.01, but 1 at least."""
    return min(max(COEFFICIENT_RATE / lr, 1.0), LARGEST_FACTOR) if lr else 1.0


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    coefficient_factor: float | None = None,
) -> list[dict[str, Any]]:
    """The parameters of a widened model (or any of ours) as groups for any optimizer of PyTorch.

    The coefficients of AltUp start at 0 or 1 (P = I, g = 1) and have a few hundred steps to move, so they need a
    higher rate than pretrained weights, and no decay.

    Args:
        model: A widened model; any other model has no group of coefficients.
        lr: The learning rate of everything else.
        weight_decay: Of matrices; vectors (norms, biases) and coefficients have none.
        coefficient_factor: The rate of the coefficients over `lr`; by default 10, or what brings it to 0.01.

    Returns:
        Groups with `params`, `lr` and `weight_decay`, of parameters that ask for gradients.

    Examples:
        >>> import altup, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=20))
        >>> groups = altup.parameter_groups(altup.widen(model), lr=5e-5, weight_decay=0.01)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> [(group["lr"], group["weight_decay"]) for group in groups]
        [(5e-05, 0.01), (5e-05, 0.0), (0.0005, 0.0)]
    """
    check_range("lr", lr, 0, float("inf"))
    check_range("weight_decay", weight_decay, 0, float("inf"))
    factor = factor_for(lr) if coefficient_factor is None else coefficient_factor
    check_range("coefficient_factor", factor, 0, float("inf"))
    coefficients = coefficient_names(model)
    kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "coefficients": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            kind = "coefficients" if name in coefficients else "matrices" if p.ndim >= 2 else "vectors"
            kinds[kind].append(p)
    settings = {
        "matrices": (lr, weight_decay),
        "vectors": (lr, 0.0),
        "coefficients": (lr * factor, 0.0),
    }
    return [
        {"params": kinds[kind], "lr": rate, "weight_decay": decay}
        for kind, (rate, decay) in settings.items()
        if kinds[kind]
    ]


class WideTrainerMixin:
    """Gives the coefficients a rate of their own under `transformers.Trainer`, and no decay.

    Everything else is as `Trainer` has it, with any of its optimizers and schedules. Set `coefficient_factor` on
    the class for another rate than that of `parameter_groups`.

    Examples:
        >>> import altup
        >>> from transformers import Trainer
        >>> class WideTrainer(altup.WideTrainerMixin, Trainer): ...
        >>> WideTrainer.coefficient_factor = 10
    """

    coefficient_factor: float | None = None

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        made = getattr(self, "optimizer", None) is None
        optimizer = super().create_optimizer(*args, **options)  # type: ignore[misc]
        if made:
            _separate_coefficients(optimizer, self.model, self.coefficient_factor)  # type: ignore[attr-defined]
        return optimizer

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """Trainer's, and how to load what was trained."""
        super().create_model_card(*args, **options)  # type: ignore[misc]
        trainer: Any = self
        folder = Path(trainer.args.output_dir)
        if WideningPlan.of(trainer.model) and trainer.is_world_process_zero() and folder.is_dir():
            write_card(trainer.model, folder, trainer.hub_model_id or "")


def _separate_coefficients(optimizer: torch.optim.Optimizer, model: nn.Module, factor: float | None) -> None:
    """Move them into groups of their own; the optimizer has made no step yet."""
    names = coefficient_names(model)
    theirs = {p for name, p in model.named_parameters() if name in names}
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if p in theirs]
        if moved:
            group["params"] = [p for p in group["params"] if p not in theirs]
            own = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            rate = group["lr"] * (factor_for(group["lr"]) if factor is None else factor)
            optimizer.add_param_group({**own, "params": moved, "lr": rate, "weight_decay": 0.0})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


_WIDENED: list[weakref.ref[nn.Module]] = []
_SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_for_decay(model: nn.Module) -> None:
    """Warn when an optimizer first steps whose decay would pull the coefficients of `model` to zero."""
    if not _WIDENED:
        register_optimizer_step_pre_hook(_warn_of_decay)
    _WIDENED[:] = [known for known in _WIDENED if known() is not None]
    _WIDENED.append(weakref.ref(model))


def _warn_of_decay(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    decayed = {p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
    widened = [model for known in _WIDENED if (model := known()) is not None]
    for model in widened if decayed else []:
        names = coefficient_names(model)
        if any(p in decayed for name, p in model.named_parameters() if name in names):
            warnings.warn(
                f"the coefficients of {type(model).__name__}, which altup.widen has widened, have a weight decay, "
                "which pulls them to zero; build the optimizer with altup.parameter_groups, or use "
                "altup.WideTrainerMixin",
                stacklevel=3,
            )
            return
