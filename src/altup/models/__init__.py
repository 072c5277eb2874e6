"""Whole models with Hugging Face's interface. Importing this package registers them with the Auto classes."""

from altup.models.bert import (
    AltUpBertConfig,
    AltUpBertForMaskedLM,
    AltUpBertForSequenceClassification,
    AltUpBertModel,
)
from altup.models.decoder import AltUpDecoderConfig, AltUpDecoderForCausalLM, AltUpDecoderModel
from altup.models.families import find_families
from altup.models.t5 import AltUpT5Config, AltUpT5EncoderModel, AltUpT5ForConditionalGeneration
from altup.models.upcycling import upcycle

__all__ = [
    "AltUpBertConfig",
    "AltUpBertForMaskedLM",
    "AltUpBertForSequenceClassification",
    "AltUpBertModel",
    "AltUpDecoderConfig",
    "AltUpDecoderForCausalLM",
    "AltUpDecoderModel",
    "AltUpT5Config",
    "AltUpT5EncoderModel",
    "AltUpT5ForConditionalGeneration",
    "upcycle",
]

find_families()
