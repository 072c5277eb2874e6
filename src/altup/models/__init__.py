"""Whole models in Hugging Face's clothes. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from altup.models.t5 import AltUpT5Config, AltUpT5EncoderModel, AltUpT5ForConditionalGeneration
from altup.models.upcycling import upcycle

__all__ = ["AltUpT5Config", "AltUpT5EncoderModel", "AltUpT5ForConditionalGeneration", "upcycle"]

AutoConfig.register(AltUpT5Config.model_type, AltUpT5Config)
AutoModel.register(AltUpT5Config, AltUpT5EncoderModel)
AutoModelForSeq2SeqLM.register(AltUpT5Config, AltUpT5ForConditionalGeneration)
