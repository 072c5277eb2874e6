"""The layers of BERT and of the decoder, counted: one stack, no cross-attention."""

from __future__ import annotations

from typing import Any

from altup.models.accounting.result import RULE
from altup.models.accounting.rules import (
    Layer,
    count_coefficients,
    expert_bytes,
    mixes_blocks,
    mixes_tokens,
    router_weights,
    rule_scalars,
)
from altup.models.bert.config import AltUpBertConfig
from altup.models.config import AltUpConfig

Counts = dict[str, int]


def list_layers(config: AltUpConfig, tokens: int) -> list[Layer]:
    """Every layer with its lengths; a stride keeps ⌈tokens / stride⌉."""
    kept = -(-tokens // config.stride)
    strided = [i in config.strided_layers for i in range(config.num_layers)]
    return [Layer(False, kept if short else tokens, tokens, 0, short) for short in strided]


def count(config: AltUpConfig, layers: list[Layer], targets: int) -> tuple[Counts, Counts, Counts]:
    """Parameters, forward FLOPs and bytes of activations, each by part, as T5 has them."""
    return (
        count_parameters(config, layers),
        count_flops(config, layers, targets),
        count_activations(config, layers, targets),
    )


def _widths(config: Any) -> tuple[int, int]:
    """Of all queries, and of all keys (or values)."""
    return config.num_heads * config.d_kv, getattr(config, "num_kv_heads", config.num_heads) * config.d_kv


def count_parameters(config: AltUpConfig, layers: list[Layer]) -> Counts:
    """Parameters by part. BERT has biases and learned positions; its head's transform is a part of its own."""
    d, f, out = config.layer_width, config.d_ff, config.output_width
    queries, keys = _widths(config)
    bert = isinstance(config, AltUpBertConfig)
    parts = {
        "input_table": config.vocab_size * config.embedding_width,
        "output_head": 0 if config.tie_word_embeddings else config.vocab_size * out,
        "positions_and_types": 0,
        "self_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        "norms": out,
        "head_transform": 0,
        "coefficients": 0,
    }
    if isinstance(config, AltUpBertConfig):
        parts["positions_and_types"] = (config.max_position_embeddings + config.type_vocab_size) * out
        parts["norms"] = 4 * out  # of the embeddings and in the head, each with a bias
        parts["head_transform"] = out * out + out + config.vocab_size  # the last is the bias of the logits
    for layer in layers:
        parts["self_attention"] += 2 * d * queries + 2 * d * keys + bert * (queries + 2 * keys + d)
        parts["feed_forward"] += 2 * d * f + f + d if bert else 3 * d * f
        parts["norms"] += 4 * d if bert else 2 * d
        parts["experts"] += config.experts * (d + 2 * d * config.expert_hidden)
        parts["coefficients"] += count_coefficients(config, layer)
    return parts


def count_flops(config: AltUpConfig, layers: list[Layer], targets: int) -> Counts:
    """Forward FLOPs of one sequence by part, 2 for each multiply-add; attention over all pairs, causal or not."""
    d, out = config.layer_width, config.output_width
    queries, keys = _widths(config)
    bert = isinstance(config, AltUpBertConfig)
    parts = {
        "self_attention_projections": 0,
        "self_attention_scores": 0,
        "feed_forward": 0,
        "experts": 0,
        "head_transform": 2 * targets * out * out if bert else 0,
        "output_head": 2 * targets * out * config.vocab_size,
        RULE: 0,
    }
    for layer in layers:
        n = layer.tokens
        parts["self_attention_projections"] += 2 * n * 2 * d * (queries + keys)
        parts["self_attention_scores"] += 2 * n * n * 2 * queries
        parts["feed_forward"] += 2 * n * (2 if bert else 3) * d * config.d_ff
        if config.experts:
            parts["experts"] += 2 * n * d * (config.experts + 2 * config.expert_top_k * config.expert_hidden)
        parts[RULE] += 2 * layer.state_tokens * (d * rule_scalars(config, layer) + 2 * router_weights(config))
    return parts


def count_activations(config: AltUpConfig, layers: list[Layer], targets: int) -> Counts:
    """Bytes that the forward pass of one sequence leaves for the backward pass, by part, as for T5.

    BERT keeps 2 tensors of its feed-forward's width (what GELU reads and gives), SwiGLU 4.
    """
    d, out, k = config.layer_width, config.output_width, config.num_blocks
    queries, keys = _widths(config)
    bert = isinstance(config, AltUpBertConfig)
    tokens = layers[0].state_tokens
    ends = tokens + targets if bert else tokens  # norms: of embeddings and head, or the final one
    parts = {
        "norm_inputs": 2 * ends * out,
        "norm_outputs": 2 * ends * out,
        "self_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        "head_transform": 2 * 2 * targets * out if bert else 0,  # what the transform reads and GELU reads
        RULE: 0,
        "logits": 4 * targets * config.vocab_size,
    }
    for layer in layers:
        n, state = layer.tokens, layer.state_tokens
        parts["norm_inputs"] += 2 * 2 * n * d
        parts["norm_outputs"] += 2 * 2 * n * d
        parts["self_attention"] += 2 * n * (2 * queries + 2 * keys) + 4 * n * config.num_heads
        parts["feed_forward"] += 2 * n * (2 if bert else 4) * config.d_ff
        parts["experts"] += expert_bytes(config, n)
        if mixes_blocks(config):
            # The wide state and the layer's output, one of which is counted above: the block that the layer's
            # first norm reads, or what BERT's last norm gives. A strided layer's spread-out output comes on top.
            parts[RULE] += 2 * d * state * (k + 1 if layer.strided else k)
        if mixes_tokens(config, layer):
            parts[RULE] += 2 * d * ((0 if bert else n) + (0 if mixes_blocks(config) else state))
    return parts
