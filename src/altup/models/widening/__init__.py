"""`widen`: AltUp for Hugging Face models that we did not write."""

from altup.models.widening.description import describe
from altup.models.widening.loading import load_widened
from altup.models.widening.structure import Structure, register_handler
from altup.models.widening.training import WideTrainerMixin, parameter_groups
from altup.models.widening.widen import narrow, widen

__all__ = [
    "Structure",
    "WideTrainerMixin",
    "describe",
    "load_widened",
    "narrow",
    "parameter_groups",
    "register_handler",
    "widen",
]
