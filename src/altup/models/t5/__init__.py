"""T5 1.1 with every update rule of the paper."""

from altup.models.t5.config import AltUpT5Config
from altup.models.t5.model import AltUpT5EncoderModel, AltUpT5ForConditionalGeneration

__all__ = ["AltUpT5Config", "AltUpT5EncoderModel", "AltUpT5ForConditionalGeneration"]
