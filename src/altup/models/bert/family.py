"""The BERT family."""

from __future__ import annotations

from transformers import AutoModelForMaskedLM, BertForMaskedLM

from altup.models.bert import convert
from altup.models.bert.classification import AltUpBertForSequenceClassification
from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.model import AltUpBertForMaskedLM, AltUpBertModel
from altup.models.config import AltUpConfig
from altup.models.families import Family, register_family

MASKED = 0.15  # of the tokens, which BERT predicts


@register_family
class Bert(Family):
    name = "bert"
    title = "BERT"
    default_size = "light"
    config_class = AltUpBertConfig
    model_class = AltUpBertForMaskedLM
    headless_class = AltUpBertModel
    auto_class = AutoModelForMaskedLM
    classifier_class = AltUpBertForSequenceClassification
    objective = "masked"
    answering = "altup.evaluation.answering.encoder:EncoderAnswering"
    learning = "altup.finetuning.learning.encoder:EncoderLearning"
    prompt = "I <extra_id_0> tea."
    hugging_face = BertForMaskedLM
    convert = staticmethod(convert.from_hugging_face)
    feed_forward_maps = 2
    feed_forward_kept = 2  # what GELU reads and gives
    has_biases = True
    keeps_output = True

    def default_targets(self, inputs: int) -> int:
        return max(1, round(inputs * MASKED))

    def end_parameters(self, config: AltUpConfig) -> dict[str, int]:
        """Learned positions and token types; norms of the embeddings and in the head, each with a bias; the head's
        transform and the bias of the logits."""
        out = config.output_width
        return {
            "positions_and_types": (config.max_position_embeddings + config.type_vocab_size) * out,
            "norms": 4 * out,
            "head_transform": out * out + out + config.vocab_size,
        }

    def head_flops(self, config: AltUpConfig, targets: int) -> dict[str, int]:
        return {"head_transform": 2 * targets * config.output_width**2}

    def head_activations(self, config: AltUpConfig, targets: int) -> dict[str, int]:
        """What the transform reads and GELU reads."""
        return {"head_transform": 2 * 2 * targets * config.output_width}

    def end_tokens(self, inputs: int, targets: int) -> int:
        return inputs + targets
