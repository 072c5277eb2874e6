"""Hugging Face BERT weights to our dense BERT and back, without loss."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from altup.core.errors import UserError
from altup.models.base import empty_like, refuse_widened, refuse_widened_layers
from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.model import AltUpBertForMaskedLM

# Ours → theirs.
_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
}
_PARTS = {
    "bert.embeddings.words": "bert.embeddings.word_embeddings",
    "bert.embeddings.positions": "bert.embeddings.position_embeddings",
    "bert.embeddings.token_types": "bert.embeddings.token_type_embeddings",
    "bert.embeddings.norm": "bert.embeddings.LayerNorm",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.decoder": "cls.predictions.decoder",
}
_LAYER_PARTS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.wi": "intermediate.dense",
    "feed_forward.wo": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of our dense BERT's parameter `name`."""
    part, kind = name.rsplit(".", 1)
    match = re.fullmatch(r"bert\.layers\.(\d+)\.(.+)", part)
    if match:
        return f"bert.encoder.layer.{match[1]}.{_LAYER_PARTS[match[2]]}.{kind}"
    return f"{_PARTS[part]}.{kind}"


def from_hugging_face(model: BertForMaskedLM) -> AltUpBertForMaskedLM:
    """Our dense BERT with the weights of a Hugging Face one; `attention_mask` and token types mean the same."""
    refuse_widened_layers(model)
    theirs = model.config
    for field, only in (("hidden_act", "gelu"), ("is_decoder", False)):
        value = getattr(theirs, field)
        if value != only:
            raise UserError(f"{field}={value!r}: only a BERT with {field}={only!r} can be converted")
    words, decoder = model.bert.embeddings.word_embeddings, model.cls.predictions.decoder
    config = AltUpBertConfig(
        **{ours: getattr(theirs, name) for ours, name in _FIELDS.items()},
        d_kv=theirs.hidden_size // theirs.num_attention_heads,
        tie_word_embeddings=torch.equal(words.weight, decoder.weight),
    )
    weights = model.state_dict()
    ours: AltUpBertForMaskedLM = empty_like(AltUpBertForMaskedLM, config, model)
    ours.load_state_dict({name: weights[hugging_face_name(name)] for name in ours.state_dict()})
    return ours


def to_hugging_face(model: AltUpBertForMaskedLM) -> BertForMaskedLM:
    """A Hugging Face BERT with the weights of our dense one."""
    ours = model.config
    refuse_widened(ours, "BERT")
    if ours.num_heads * ours.d_kv != ours.d_model:
        raise UserError(
            f"num_heads={ours.num_heads} × d_kv={ours.d_kv} is not d_model={ours.d_model}, as Hugging Face's BERT "
            "needs it; use save_pretrained"
        )
    fields: dict[str, Any] = {name: getattr(ours, field) for field, name in _FIELDS.items()}
    config = BertConfig(**fields, tie_word_embeddings=bool(ours.tie_word_embeddings))
    theirs: BertForMaskedLM = empty_like(BertForMaskedLM, config, model)
    weights = {hugging_face_name(name): value for name, value in model.state_dict().items()}
    weights["cls.predictions.bias"] = weights["cls.predictions.decoder.bias"]
    theirs.load_state_dict(weights)
    return theirs
