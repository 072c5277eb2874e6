"""T5's layers, counted."""

from __future__ import annotations

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
from altup.models.t5.config import AltUpT5Config


def list_layers(config: AltUpT5Config, inputs: int, targets: int) -> list[Layer]:
    """Every layer of both stacks with its lengths; a stride keeps ⌈length / stride⌉ tokens."""
    kept = -(-inputs // config.stride)
    state = kept if config.sequence == "pool" else inputs
    encoder = [
        Layer(False, kept if strided else state, state, 0, strided)
        for strided in (i in config.strided_layers for i in range(config.num_layers))
    ]
    decoder = [Layer(True, targets, targets, state, False)] * (config.num_decoder_layers or 0)
    return encoder + decoder


def count_parameters(config: AltUpT5Config, layers: list[Layer]) -> dict[str, int]:
    """Parameters by part. There are no biases in T5 1.1."""
    d, inner, out = config.layer_width, config.num_heads * config.d_kv, config.output_width
    parts = {
        "input_table": config.vocab_size * config.embedding_width,
        "output_head": 0 if config.tie_word_embeddings else config.vocab_size * out,
        "self_attention": 0,
        "cross_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        "norms": 2 * out,  # the final norm of each stack
        "relative_bias": 2 * config.relative_attention_num_buckets * config.num_heads,
        "coefficients": 0,
    }
    for layer in layers:
        parts["self_attention"] += 4 * d * inner
        parts["feed_forward"] += 3 * d * config.d_ff
        parts["norms"] += 2 * d
        if layer.decoder:
            parts["cross_attention"] += 2 * d * inner + 2 * out * inner
            parts["norms"] += d
        parts["experts"] += config.experts * (d + 2 * d * config.expert_hidden)
        parts["coefficients"] += count_coefficients(config, layer)
    return parts


def count_flops(config: AltUpT5Config, layers: list[Layer], targets: int) -> dict[str, int]:
    """Forward FLOPs of one sequence by part, 2 for each multiply-add.

    Attention is counted over all pairs, causal or not. Norms, softmax, activation functions, residual and
    pooling additions and table look-ups are left out. The rules are counted in their fused form: for each of
    a token's d columns K² + K multiply-adds for K blocks, and 3 for Sequence-AltUp.
    """
    d, inner, out = config.layer_width, config.num_heads * config.d_kv, config.output_width
    parts = {
        "self_attention_projections": 0,
        "self_attention_scores": 0,
        "cross_attention_projections": 0,
        "cross_attention_scores": 0,
        "feed_forward": 0,
        "experts": 0,
        "output_head": 2 * targets * out * config.vocab_size,
        RULE: 0,
    }
    for layer in layers:
        n, memory = layer.tokens, layer.memory
        parts["self_attention_projections"] += 2 * n * 4 * d * inner
        parts["self_attention_scores"] += 2 * n * n * 2 * inner
        parts["feed_forward"] += 2 * n * 3 * d * config.d_ff
        if layer.decoder:
            parts["cross_attention_projections"] += 2 * (n * 2 * d * inner + memory * 2 * out * inner)
            parts["cross_attention_scores"] += 2 * n * memory * 2 * inner
        if config.experts:
            parts["experts"] += 2 * n * d * (config.experts + 2 * config.expert_top_k * config.expert_hidden)
        parts[RULE] += 2 * layer.state_tokens * (d * rule_scalars(config, layer) + 2 * router_weights(config))
    return parts


def count_activations(config: AltUpT5Config, layers: list[Layer], targets: int) -> dict[str, int]:
    """Bytes that the forward pass of one sequence leaves for the backward pass, by part.

    Every tensor that some derivative reads is kept once, in bfloat16 (2 bytes) unless said otherwise: the
    input and the output of each norm; queries, keys, values and output of fused attention with its float32
    log-sums (never the scores); the outputs of wi_0, GELU and wi_1 and their product; for an update rule the
    state and the layer's output. No dropout, no recomputation. What a whole batch shares, the relative bias,
    is left out.
    """
    d, inner, out = config.layer_width, config.num_heads * config.d_kv, config.output_width
    heads, k = config.num_heads, config.num_blocks
    memory = next(layer.state_tokens for layer in layers)
    parts = {
        "norm_inputs": 2 * (memory + targets) * out,
        "norm_outputs": 2 * (memory + targets) * out,
        "self_attention": 0,
        "cross_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        RULE: 0,
        "logits": 4 * targets * config.vocab_size,  # float32, as the loss reads them
    }
    for layer in layers:
        n, state = layer.tokens, layer.state_tokens
        norms = 3 if layer.decoder else 2
        parts["norm_inputs"] += 2 * norms * n * d
        parts["norm_outputs"] += 2 * norms * n * d
        parts["self_attention"] += 2 * n * 4 * inner + 4 * n * heads
        if layer.decoder:
            parts["cross_attention"] += 2 * (n * 2 * inner + layer.memory * 2 * inner) + 4 * n * heads
        parts["feed_forward"] += 2 * n * 4 * config.d_ff
        parts["experts"] += expert_bytes(config, n)
        if mixes_blocks(config):
            # The wide state and the layer's output. The block a whole-length layer reads is counted above.
            parts[RULE] += 2 * d * state * (k + 1 if layer.strided else k)
        if mixes_tokens(config, layer):
            parts[RULE] += 2 * d * (n if mixes_blocks(config) else n + state)
    return parts
