"""From a config to the modules that widen a stack: its rule, its strided layers, its experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from altup.models.config import AltUpConfig
from altup.nn import AltUp, DynamicAltUp, PartialExperts, SequenceAltUp, StrideAndSkip, Sum


def build_rule(config: AltUpConfig, num_layers: int, lowering: str | None = None) -> AltUp | Sum:
    """The rule that updates a stack's state; `lowering` is how Recycled-AltUp joins its blocks."""
    if config.widening == "sum":
        return Sum(config.num_blocks)
    if config.selects_blocks:
        recycled = config.widening == "recycled"
        selection = config.selection or "alternating"
        options: dict[str, Any] = {"recycled": recycled, "lowering": lowering if recycled else None}
        if config.coefficients == "dynamic":
            return DynamicAltUp(config.num_blocks, num_layers, config.d_model, selection, **options)
        return AltUp(config.num_blocks, num_layers, selection, **options)
    return AltUp(1, num_layers)


def stride_layers(config: AltUpConfig, layers: nn.ModuleList) -> None:
    """Wrap the layers that see every `stride`-th token only, in place."""
    wrapper = SequenceAltUp if config.sequence == "altup" else StrideAndSkip
    for index in config.strided_layers:
        layers[index] = wrapper(layers[index], config.stride)


def build_experts(config: AltUpConfig) -> PartialExperts | None:
    if not config.experts:
        return None
    return PartialExperts(
        config.layer_width,
        config.experts,
        config.expert_hidden,
        config.expert_top_k,
        config.expert_jitter,
        balance=config.expert_balance > 0,
    )
