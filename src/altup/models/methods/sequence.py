"""Fewer tokens for layers: Sequence-AltUp predicts and corrects those that a layer skips, stride-and-skip leaves
them unchanged, and pooling averages neighbours before the first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.models.methods.registry import WIDENINGS, Preset, Sequence, register
from altup.nn import SequenceAltUp as SequenceAltUpLayer
from altup.nn import StrideAndSkip

if TYPE_CHECKING:
    from torch import nn

    from altup.models.config import AltUpConfig
    from altup.models.methods.registry import Layer


@register
class SequenceAltUp(Sequence):
    name = "altup"
    presets: ClassVar = {"sequence-altup": Preset("AltUp along the sequence", {"sequence": "altup"})}
    strides_layers = True

    def wrap(self, layer: nn.Module, stride: int) -> nn.Module:
        return SequenceAltUpLayer(layer, stride)

    def has_coefficients(self, config: AltUpConfig) -> bool:
        return bool(config.strided_layers)

    def parameters(self, config: AltUpConfig, layer: Layer) -> int:
        """a₁, a₂ and b."""
        return 3 if layer.strided else 0

    def flops(self, config: AltUpConfig, layer: Layer) -> int:
        return 2 * layer.state_tokens * 3 * config.layer_width if layer.strided else 0

    def activation_bytes(self, config: AltUpConfig, layer: Layer) -> int:
        """What the layer gives, unless its last norm keeps it, and the tokens around it, unless the state does."""
        if not layer.strided:
            return 0
        widened = WIDENINGS[config.widening].state_blocks(config) > 1
        tokens = (0 if layer.keeps_output else layer.tokens) + (0 if widened else layer.state_tokens)
        return 2 * config.layer_width * tokens


@register
class Skip(Sequence):
    name = "skip"
    presets: ClassVar = {"stride-and-skip": Preset("layers skip tokens", {"sequence": "skip"})}
    strides_layers = True

    def wrap(self, layer: nn.Module, stride: int) -> nn.Module:
        return StrideAndSkip(layer, stride)


@register
class Pool(Sequence):
    name = "pool"
    presets: ClassVar = {"average-pooling": Preset("neighbouring tokens averaged", {"sequence": "pool"})}
    shortens = True
