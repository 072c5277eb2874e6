"""A modern decoder with every widening rule of the paper."""

from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.decoder.model import AltUpDecoderForCausalLM, AltUpDecoderModel

__all__ = ["AltUpDecoderConfig", "AltUpDecoderForCausalLM", "AltUpDecoderModel"]
