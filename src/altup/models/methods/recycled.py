"""Recycled-AltUp: AltUp inside, while table, norm and head stay as wide as a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from altup.core.errors import UserError
from altup.models.methods.altup import AltUp
from altup.models.methods.registry import Preset, Widening, register

if TYPE_CHECKING:
    from altup.models.config import AltUpConfig


@register
class Recycled(AltUp):
    name = "recycled"
    presets: ClassVar = {
        "recycled": Preset(
            "AltUp with the dense model's table and head",
            {"widening": "recycled", "selection": "alternating"},
            upcycles=True,
        )
    }
    embedding_width = output_width = Widening.output_width

    def check(self, config: AltUpConfig) -> None:
        super().check(config)
        if config.coefficients == "fixed":
            raise UserError(
                "coefficients='fixed' does not fit widening='recycled': its blocks start equal and would stay so, "
                "which is the dense model; take widening='altup', or 'none'"
            )
