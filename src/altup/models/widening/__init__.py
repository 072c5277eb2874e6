"""`widen`: AltUp for Hugging Face models that we did not write."""

from altup.models.widening.structure import Structure, register_handler
from altup.models.widening.widen import load_widened, narrow, widen

__all__ = ["Structure", "load_widened", "narrow", "register_handler", "widen"]
