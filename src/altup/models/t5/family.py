"""The T5 family."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from altup.models.config import AltUpConfig
from altup.models.families import Family, register_family
from altup.models.methods.registry import Layer
from altup.models.t5 import convert
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.model import AltUpT5EncoderModel, AltUpT5ForConditionalGeneration


@register_family
class T5(Family):
    name = "t5"
    title = "T5 1.1"
    default_size = "small"
    config_class = AltUpT5Config
    model_class = AltUpT5ForConditionalGeneration
    headless_class = AltUpT5EncoderModel
    auto_class = AutoModelForSeq2SeqLM
    objective = "span-corruption"
    answering = "altup.evaluation.answering.seq2seq:Seq2SeqAnswering"
    learning = "altup.finetuning.learning.seq2seq:Seq2SeqLearning"
    prompt = "I <extra_id_0> tea."
    hugging_face = T5ForConditionalGeneration
    convert = staticmethod(convert.from_hugging_face)
    # With these a new T5 leaves its plateau sooner.
    muon_factors: ClassVar = {"positions": 4.0, "vectors": 0.1}

    def special_tokens(self, vocabulary: Any) -> dict[str, int]:
        return {"eos_token_id": vocabulary.eos, "decoder_start_token_id": vocabulary.pad}

    def run_fields(self, dropout: float, inputs_length: int) -> dict[str, Any]:
        return {"dropout_rate": dropout}

    def default_targets(self, inputs: int) -> int:
        """Those of one pretraining example: 568 raw tokens make inputs of 512."""
        return 114

    def more_layers(self, config: AltUpConfig, targets: int, memory: int) -> list[Layer]:
        """The decoder's, each with cross-attention."""
        return [Layer(True, targets, targets, memory, False)] * config.num_decoder_layers

    def end_parameters(self, config: AltUpConfig) -> dict[str, int]:
        """The final norm of each stack, and its table of relative positions."""
        bias = 2 * config.relative_attention_num_buckets * config.num_heads
        return {"norms": 2 * config.output_width, "relative_bias": bias}

    def end_tokens(self, inputs: int, targets: int) -> int:
        return inputs + targets


T5S = (T5ForConditionalGeneration, AltUpT5ForConditionalGeneration)  # what the class above can be made of
