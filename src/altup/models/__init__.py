"""Whole models with Hugging Face's interface. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from altup.models.bert import (
    AltUpBertConfig,
    AltUpBertForMaskedLM,
    AltUpBertForSequenceClassification,
    AltUpBertModel,
)
from altup.models.decoder import AltUpDecoderConfig, AltUpDecoderForCausalLM, AltUpDecoderModel
from altup.models.families import FAMILIES
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

for _family in FAMILIES.values():
    AutoConfig.register(_family.config_class.model_type, _family.config_class)
    AutoModel.register(_family.config_class, _family.headless_class)
    _family.auto_class.register(_family.config_class, _family.model_class)
AutoModelForSequenceClassification.register(AltUpBertConfig, AltUpBertForSequenceClassification)
# Trainer's label smoothing looks in this list for the models whose labels it has to shift.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AltUpDecoderConfig.model_type] = AltUpDecoderForCausalLM.__name__
