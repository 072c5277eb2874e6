"""Whole models in Hugging Face's clothes. Importing this package registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from altup.models.bert import AltUpBertConfig, AltUpBertForMaskedLM, AltUpBertModel
from altup.models.decoder import AltUpDecoderConfig, AltUpDecoderForCausalLM, AltUpDecoderModel
from altup.models.t5 import AltUpT5Config, AltUpT5EncoderModel, AltUpT5ForConditionalGeneration
from altup.models.upcycling import upcycle

__all__ = [
    "AltUpBertConfig",
    "AltUpBertForMaskedLM",
    "AltUpBertModel",
    "AltUpDecoderConfig",
    "AltUpDecoderForCausalLM",
    "AltUpDecoderModel",
    "AltUpT5Config",
    "AltUpT5EncoderModel",
    "AltUpT5ForConditionalGeneration",
    "upcycle",
]

for _config in (AltUpBertConfig, AltUpDecoderConfig, AltUpT5Config):
    AutoConfig.register(_config.model_type, _config)
AutoModel.register(AltUpBertConfig, AltUpBertModel)
AutoModel.register(AltUpDecoderConfig, AltUpDecoderModel)
AutoModel.register(AltUpT5Config, AltUpT5EncoderModel)
AutoModelForMaskedLM.register(AltUpBertConfig, AltUpBertForMaskedLM)
AutoModelForCausalLM.register(AltUpDecoderConfig, AltUpDecoderForCausalLM)
AutoModelForSeq2SeqLM.register(AltUpT5Config, AltUpT5ForConditionalGeneration)
# By this list of names Trainer's label smoothing knows whose labels it has to shift.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AltUpDecoderConfig.model_type] = AltUpDecoderForCausalLM.__name__
