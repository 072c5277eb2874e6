"""AltUp: K blocks, of which each layer computes one; the others are predicted and corrected.

Its coefficients are `static`, as in the paper, `dynamic` (made from each token, as in Gemma 3n) or `fixed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from altup.core.errors import UserError, check_choice, named
from altup.models.methods.registry import Preset, Widening, register
from altup.nn import AltUp as AltUpRule
from altup.nn import DynamicAltUp, FixedAltUp

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig
    from altup.models.methods.registry import Layer
    from altup.nn.rule import Rule

SELECTIONS = ("alternating", "same")
COEFFICIENTS = ("static", "dynamic", "fixed")
SITES = ("layer", "sublayer")


@register
class AltUp(Widening):
    name = "altup"
    presets: ClassVar = {
        "altup": Preset("Alternating Updates", {"widening": "altup", "selection": "alternating"}, upcycles=True),
        "sameup": Preset(
            "AltUp whose layers all work on block 0", {"widening": "altup", "selection": "same"}, True
        ),
    }
    settings: ClassVar = {"sites": "layer"}  # or "sublayer": predicts and corrects around each of a layer's parts
    selects = True

    def check(self, config: AltUpConfig) -> None:
        if config.num_blocks > 1 and config.selection is None:
            config.selection = "alternating"
        if isinstance(config.selection, str):
            check_choice("selection", config.selection, SELECTIONS)
        elif config.selection is not None:
            self._check_blocks(config)
        check_choice("coefficients", config.coefficients, COEFFICIENTS)
        self._check_sites(config)
        super().check(config)

    def _check_sites(self, config: Any) -> None:
        check_choice("sites", config.sites, SITES)
        if config.sites == "sublayer" and config.strided_layers:
            raise UserError(
                f"{named('sites', config.sites)} does not fit {named('sequence', config.sequence)}, which strides "
                "whole layers; take sites='layer'"
            )
        if config.sites == "sublayer" and isinstance(config.selection, list):
            raise UserError(
                f"{named('sites', config.sites)} does not fit {named('selection', config.selection)}, which has "
                "one block a layer; give 'alternating' or 'same'"
            )

    def sites_per_layer(self, config: Any, crosses: bool = False) -> int:
        return 1 if config.sites == "layer" else 2 + crosses

    def _check_blocks(self, config: AltUpConfig) -> None:
        blocks = config.selection if isinstance(config.selection, list | tuple) else [-1]
        if not all(type(block) is int and 0 <= block < config.num_blocks for block in blocks):
            raise UserError(
                f"{named('selection', config.selection)} must be 'alternating', 'same' or a list of blocks from 0 "
                f"to {config.num_blocks - 1}, one a layer"
            )
        config.selection = list(blocks)

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        selection = config.selection or "alternating"
        if config.coefficients == "fixed":
            return FixedAltUp(config.num_blocks, num_sites, selection)
        recycled = self.output_width(config) < config.num_blocks * config.d_model
        options: dict[str, Any] = {"recycled": recycled, "lowering": lowering if recycled else None}
        if config.coefficients == "dynamic":
            return DynamicAltUp(config.num_blocks, num_sites, config.d_model, selection, **options)
        return AltUpRule(config.num_blocks, num_sites, selection, **options)

    def embedding_width(self, config: AltUpConfig) -> int:
        return config.num_blocks * config.d_model

    def output_width(self, config: AltUpConfig) -> int:
        return config.num_blocks * config.d_model

    def has_coefficients(self, config: AltUpConfig) -> bool:
        """Fixed ones are none: one block moves for all."""
        return config.num_blocks > 1 and config.coefficients != "fixed"

    def has_scalars(self, config: AltUpConfig) -> bool:
        return self.has_coefficients(config) and config.coefficients == "static"

    def state_blocks(self, config: AltUpConfig) -> int:
        return config.num_blocks if self.has_coefficients(config) else 1

    def parameters(self, config: AltUpConfig, layer: Layer) -> int:
        """P and g of each site; dynamic ones: K for each coefficient, the router and its norm."""
        k, d = config.num_blocks, config.d_model
        if not self.has_coefficients(config):
            return 0
        of_a_site = k * k + k if config.coefficients == "static" else k * (k * k + k) + k * d + d
        return of_a_site * self.sites_per_layer(config, layer.decoder)

    def flops(self, config: AltUpConfig, layer: Layer) -> int:
        """K² + K multiply-adds for each of a token's d columns; a router runs on the state and on what the layer
        computed."""
        k, d = config.num_blocks, config.d_model
        if not self.has_coefficients(config):
            return 0
        router = 2 * k * d if config.coefficients == "dynamic" else 0
        return 2 * layer.state_tokens * (d * (k * k + k) + router) * self.sites_per_layer(config, layer.decoder)

    def activation_bytes(self, config: AltUpConfig, layer: Layer) -> int:
        """The wide state and the layer's output, one of which is counted already: the block that the layer's first
        norm reads, or what BERT's last norm gives. A strided layer's spread-out output comes on top."""
        blocks = config.num_blocks + 1 if layer.strided else config.num_blocks
        blocks *= self.sites_per_layer(config, layer.decoder)
        return 2 * config.d_model * layer.state_tokens * blocks if self.has_coefficients(config) else 0
