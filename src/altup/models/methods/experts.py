"""Partial experts beside each feed-forward: small ones, of which a router chooses a few for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.core.errors import UserError, check_range, check_whole, named
from altup.models.methods.registry import MOST, Method, Preset, register

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig
    from altup.models.methods.registry import Layer


@register
class Experts(Method):
    kind = "experts"
    name = "experts"
    presets: ClassVar = {"moe": Preset("partial experts", {"experts": 128})}
    cost_part = parameter_part = "experts"

    def check(self, config: AltUpConfig) -> None:
        check_whole("experts", config.experts, 0, MOST["experts"])
        check_whole("expert_hidden", config.expert_hidden, 1, MOST["expert_hidden"])
        check_whole("expert_top_k", config.expert_top_k, 1)
        if 0 < config.experts < config.expert_top_k:
            raise UserError(
                f"{named('expert_top_k', config.expert_top_k)} is more than {named('experts', config.experts)}; "
                "lower one"
            )
        check_range("expert_jitter", config.expert_jitter, 0, 1)
        check_range("expert_balance", config.expert_balance, 0, float("inf"))

    def parameters(self, config: AltUpConfig, layer: Layer) -> int:
        d = config.layer_width
        return config.experts * (d + 2 * d * config.expert_hidden)

    def flops(self, config: AltUpConfig, layer: Layer) -> int:
        if not config.experts:
            return 0
        chosen = config.experts + 2 * config.expert_top_k * config.expert_hidden
        return 2 * layer.tokens * config.layer_width * chosen

    def activation_bytes(self, config: AltUpConfig, layer: Layer) -> int:
        """Router input and probabilities in float32, and of the experts chosen input, hidden layer and output."""
        if not config.experts:
            return 0
        width, chosen = config.layer_width, layer.tokens * config.expert_top_k
        return 4 * layer.tokens * (width + config.experts) + 2 * chosen * (2 * width + config.expert_hidden)
