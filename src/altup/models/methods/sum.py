"""The baseline that adds K embeddings up and is dense from there on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.models.methods.registry import Preset, Widening, register
from altup.nn.altup import Sum as SumRule

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig
    from altup.nn.rule import Rule


@register
class Sum(Widening):
    name = "sum"
    presets: ClassVar = {"sum": Preset("K embeddings added up, then dense", {"widening": "sum"})}

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        return SumRule(config.num_blocks)

    def embedding_width(self, config: AltUpConfig) -> int:
        return config.num_blocks * config.d_model
