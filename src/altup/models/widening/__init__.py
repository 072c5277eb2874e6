"""`widen`: AltUp for Hugging Face models that we did not write."""

from altup.models.widening.handlers import Structure, register_handler
from altup.models.widening.save import load_widened
from altup.models.widening.widen import narrow, widen

__all__ = ["Structure", "load_widened", "narrow", "register_handler", "widen"]
