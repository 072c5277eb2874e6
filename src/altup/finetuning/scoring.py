"""The model that a fine-tuning run is scored with: whole on every process, and quick to decode with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from altup.evaluation.decoding import round_weights
from altup.models.t5.model import AltUpT5ForConditionalGeneration
from altup.training.parallel import whole


def model_to_score(model: nn.Module, low_precision: bool) -> Any:
    """`model`, or a copy of its present weights that computes the same.

    Sharded weights are gathered, because processes that decode take different numbers of steps (a collective:
    every process must call it). With `low_precision`, for a run under bf16 autocast, weights are rounded once
    instead of in every step of every answer.
    """
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if not sharded and not low_precision:
        return model
    trained: Any = model
    with torch.device("meta"):
        copy: Any = AltUpT5ForConditionalGeneration(trained.config)
    copy.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()}, assign=True)
    copy.generation_config = trained.generation_config
    if low_precision:
        round_weights(copy, torch.bfloat16)
    return copy.eval()
