"""Hugging Face Llama weights to our dense decoder and back, without loss."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from altup.core.errors import UserError
from altup.models.base import empty_like, refuse_widened, refuse_widened_layers
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.decoder.model import AltUpDecoderForCausalLM

# Ours → theirs.
_FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
    "layer_norm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
_PARTS = {
    ".attention.q.": ".self_attn.q_proj.",
    ".attention.k.": ".self_attn.k_proj.",
    ".attention.v.": ".self_attn.v_proj.",
    ".attention.o.": ".self_attn.o_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".feed_forward.gate.": ".mlp.gate_proj.",
    ".feed_forward.up.": ".mlp.up_proj.",
    ".feed_forward.down.": ".mlp.down_proj.",
    ".feed_forward_norm.": ".post_attention_layernorm.",
    ".final_norm.": ".norm.",
}


def hugging_face_name(name: str) -> str:
    """Llama's name of our dense decoder's parameter `name`."""
    for ours, theirs in _PARTS.items():
        name = name.replace(ours, theirs)
    return name


def from_hugging_face(model: LlamaForCausalLM) -> AltUpDecoderForCausalLM:
    """Our dense decoder with the weights of a Hugging Face Llama that has plain rotary positions and no biases."""
    refuse_widened_layers(model)
    theirs = model.config
    rope: Any = theirs.rope_parameters
    for field, value, only in (
        ("rope_type", rope["rope_type"], "default"),
        ("hidden_act", theirs.hidden_act, "silu"),
        ("attention_bias", theirs.attention_bias, False),
        ("mlp_bias", theirs.mlp_bias, False),
    ):
        if value != only:
            raise UserError(f"{field}={value!r}: only a Llama with {field}={only!r} can be converted")
    config = AltUpDecoderConfig(
        **{ours: getattr(theirs, name) for ours, name in _FIELDS.items()},
        rope_theta=float(rope["rope_theta"]),
        tie_word_embeddings=torch.equal(model.lm_head.weight, model.model.embed_tokens.weight),
    )
    weights = model.state_dict()
    ours: AltUpDecoderForCausalLM = empty_like(AltUpDecoderForCausalLM, config, model)
    ours.load_state_dict({name: weights[hugging_face_name(name)] for name in ours.state_dict()})
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def to_hugging_face(model: AltUpDecoderForCausalLM) -> LlamaForCausalLM:
    """A Hugging Face Llama with the weights of our dense decoder."""
    ours = model.config
    refuse_widened(ours, "decoder")
    if ours.dropout_rate:
        raise UserError(f"dropout_rate={ours.dropout_rate}: Llama has none beside attention's; set it to 0")
    fields: dict[str, Any] = {name: getattr(ours, field) for field, name in _FIELDS.items()}
    config = LlamaConfig(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        tie_word_embeddings=ours.tie_word_embeddings,
    )
    theirs: LlamaForCausalLM = empty_like(LlamaForCausalLM, config, model)
    theirs.load_state_dict({hugging_face_name(name): value for name, value in model.state_dict().items()})
    theirs.generation_config = copy.deepcopy(model.generation_config)
    return theirs
