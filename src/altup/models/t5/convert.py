"""Hugging Face T5 1.1 and Flan-T5 weights to our dense T5 and back, without loss."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from altup.core.errors import UserError
from altup.models.base import empty_like, refuse_widened, refuse_widened_layers
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.model import AltUpT5ForConditionalGeneration

_SAME_FIELDS = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "dropout_rate",
    "layer_norm_epsilon",
    "feed_forward_proj",
    "scale_decoder_outputs",
    "pad_token_id",
    "eos_token_id",
)

# Ours → theirs. The decoder has cross-attention between the two sublayers of an encoder layer.
_LAYER_NAMES = {
    "encoder": {
        "attention": "layer.0.SelfAttention",
        "attention_norm": "layer.0.layer_norm",
        "feed_forward": "layer.1.DenseReluDense",
        "feed_forward_norm": "layer.1.layer_norm",
    },
    "decoder": {
        "attention": "layer.0.SelfAttention",
        "attention_norm": "layer.0.layer_norm",
        "cross_attention": "layer.1.EncDecAttention",
        "cross_norm": "layer.1.layer_norm",
        "feed_forward": "layer.2.DenseReluDense",
        "feed_forward_norm": "layer.2.layer_norm",
    },
}


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of our dense T5's parameter `name`."""
    if name == "encoder.embed_tokens.weight":
        return "shared.weight"
    match = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if match:
        stack, index, part, rest = match.groups()
        return f"{stack}.block.{index}.{_LAYER_NAMES[stack][part]}.{rest}"
    name = name.replace("relative_bias.weight", "block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    return name.replace("final_norm", "final_layer_norm")


CONVERTED = "gated-gelu"  # the feed-forward of T5 1.1


def from_hugging_face(model: T5ForConditionalGeneration) -> AltUpT5ForConditionalGeneration:
    """Our dense T5 with the weights of a Hugging Face T5 1.1 or Flan-T5."""
    refuse_widened_layers(model)
    theirs = model.config
    if theirs.feed_forward_proj != CONVERTED:
        raise UserError(
            f"feed_forward_proj={theirs.feed_forward_proj!r}: only T5 1.1 shapes (gated-gelu) can be converted; "
            "take a T5 1.1 or Flan-T5 checkpoint"
        )
    # The flag in their config is always true; only the tensors tell whether the head is tied.
    tied = torch.equal(model.lm_head.weight, model.shared.weight)
    of_config = getattr(theirs, "decoder_start_token_id", None)
    starts = (model.generation_config.decoder_start_token_id, of_config, theirs.pad_token_id, 0)
    config = AltUpT5Config(
        **{field: getattr(theirs, field) for field in _SAME_FIELDS},
        decoder_start_token_id=next(token for token in starts if token is not None),
        tie_word_embeddings=tied,
    )
    weights = model.state_dict()
    ours = empty_like(AltUpT5ForConditionalGeneration, config, model)
    ours.load_state_dict({name: weights[hugging_face_name(name)] for name in ours.state_dict()})
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def to_hugging_face(model: AltUpT5ForConditionalGeneration) -> T5ForConditionalGeneration:
    """A Hugging Face T5 with the weights of our dense T5."""
    ours: Any = model.config
    refuse_widened(ours, "T5")
    fields: dict[str, Any] = {
        **{field: getattr(ours, field) for field in _SAME_FIELDS if field != "scale_decoder_outputs"},
        "decoder_start_token_id": ours.decoder_start_token_id,
        # Their class reads this flag as "scale the decoder's output", and ties in any case.
        "tie_word_embeddings": ours.scale_decoder_outputs,
    }
    theirs = empty_like(T5ForConditionalGeneration, T5Config(**fields), model)
    weights = {hugging_face_name(name): value for name, value in model.state_dict().items()}
    if not ours.tie_word_embeddings:
        theirs.lm_head.weight = nn.Parameter(weights["lm_head.weight"].clone())
    for stack in ("encoder", "decoder"):
        weights[f"{stack}.embed_tokens.weight"] = weights["shared.weight"]
    theirs.load_state_dict(weights)
    theirs.generation_config = copy.deepcopy(model.generation_config)
    return theirs
