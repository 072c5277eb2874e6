"""The plain model: one block, which every layer reads and replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.core.errors import UserError, named
from altup.models.methods.registry import WIDENINGS, Preset, Sequence, Widening, register
from altup.nn import AltUp

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig
    from altup.nn.rule import Rule


@register
class Dense(Widening):
    name = "none"
    presets: ClassVar = {"dense": Preset("the plain model", upcycles=True)}
    has_blocks = False

    def check(self, config: AltUpConfig) -> None:
        if config.num_blocks != 1:
            others = ", ".join(repr(name) for name, one in WIDENINGS.items() if one.has_blocks)
            raise UserError(
                f"{named('num_blocks', config.num_blocks)} needs a widening; set widening to one of {others}, or "
                "num_blocks to 1"
            )
        super().check(config)

    def build_rule(self, config: AltUpConfig, num_sites: int, lowering: str | None) -> Rule:
        return AltUp(1, num_sites)


@register
class WholeSequence(Sequence):
    """Every layer sees every token."""

    name = "none"
