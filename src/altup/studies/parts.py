"""What a run's config stands for: its objective, and its model before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from altup.data.objectives import Objective
    from altup.data.tokenizer import Vocabulary
    from altup.training.pretraining import PretrainConfig


def objective_of(config: PretrainConfig, vocabulary: Vocabulary) -> Objective:
    from altup.data.objectives import build_objective
    from altup.training.pretraining import OBJECTIVES

    name = OBJECTIVES[config.model]
    return build_objective(name, vocabulary, config.inputs_length, config.noise_density, config.mean_span)


def fresh_model(config: PretrainConfig, vocabulary: Vocabulary) -> nn.Module:
    """The very weights with which `pretrain` begins."""
    import torch

    from altup.training.pretraining import build_model

    torch.manual_seed(config.seed)
    return build_model(config.model, config.model_config(vocabulary), None)
