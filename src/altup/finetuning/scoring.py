"""The model that answers held-out examples during training, with the weights of the one that learns."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from altup.evaluation.decoding import round_weights
from altup.models.families import family, family_name
from altup.models.foreign import without_sums, without_weights
from altup.training.parallel import full_tensor


def copy_to_score(model: torch.nn.Module, low_precision: bool) -> Any:
    """A `model` of altup, or a copy of its present weights that computes the same.

    Sharded weights are gathered, because processes that decode take different numbers of steps (a collective:
    every process must call it). With `low_precision`, for a run under bf16 autocast, weights are rounded once
    instead of in every step of every answer.
    """
    if not is_sharded(model) and not low_precision:
        return model
    trained: Any = model
    model_class = family(str(family_name(trained.config.model_type))).model_class
    with torch.device("meta"):
        copy: Any = model_class(trained.config)
    copy.load_state_dict(_gathered(model), assign=True)
    copy.generation_config = trained.generation_config
    if low_precision:
        round_weights(copy, torch.bfloat16)
    return copy.eval()


def foreign_to_score(model: torch.nn.Module) -> Any:
    """The same of a `SumsModel`: itself as an object of its own class or, of sharded weights, a copy."""
    trained: Any = model
    if not is_sharded(trained):
        return without_sums(trained)
    copy = without_weights(trained)
    copy.load_state_dict(_gathered(trained))
    if copy.can_generate():
        copy.generation_config = trained.generation_config
    return copy.to(trained.device).eval()


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
