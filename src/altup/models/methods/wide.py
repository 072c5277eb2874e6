"""The baseline whose layers are K times as wide themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.models.methods.registry import Preset, Widening, register
from altup.nn import AltUp

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig
    from altup.nn.rule import Rule


@register
class Wide(Widening):
    name = "wide"
    presets: ClassVar = {"dense-wide": Preset("a dense model K times as wide", {"widening": "wide"})}

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        return AltUp(1, num_sites)

    def layer_width(self, config: AltUpConfig) -> int:
        return config.num_blocks * config.d_model

    embedding_width = output_width = layer_width
