"""The decoder family."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from altup.models.decoder import convert
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.decoder.model import AltUpDecoderForCausalLM, AltUpDecoderModel
from altup.models.families import Family, register_family


@register_family
class Decoder(Family):
    name = "decoder"
    title = "decoder"
    default_size = "small"
    config_class = AltUpDecoderConfig
    model_class = AltUpDecoderForCausalLM
    headless_class = AltUpDecoderModel
    auto_class = AutoModelForCausalLM
    objective = "causal"
    answering = "altup.evaluation.answering.causal:CausalAnswering"
    learning = "altup.finetuning.learning.causal:CausalLearning"
    prompt = "Once upon a time"
    hugging_face = LlamaForCausalLM
    convert = staticmethod(convert.from_hugging_face)

    def special_tokens(self, vocabulary: Any) -> dict[str, int]:
        start = vocabulary.eos if vocabulary.start is None else vocabulary.start
        return {"eos_token_id": vocabulary.eos, "bos_token_id": start}


# Trainer's label smoothing looks in this list for the models whose labels it has to shift.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AltUpDecoderConfig.model_type] = AltUpDecoderForCausalLM.__name__
