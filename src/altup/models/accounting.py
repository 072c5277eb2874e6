"""What a configuration costs, from the configuration alone: parameters, FLOPs and activation memory.

Nothing is built: every number is a closed form over the layers, so XL takes as long as tiny. The parts are
kept apart, because where a cost comes from matters as much as its sum. docs/accounting.md explains each item.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from altup.errors import check_whole
from altup.models.t5.config import AltUpT5Config

# One pretraining example of T5: 568 raw tokens after span corruption.
INPUTS, TARGETS = 512, 114

EMBEDDING_PARTS = ("input_table", "output_head")
RULE = "update_rule"
TOTALS = (
    *("embedding", "non_embedding", "total", "flops_forward", "flops_matrix", "flops_train"),
    *("activation_bytes", "activation_bytes_paper", "inputs", "targets"),
)
SHAPE_FIELDS = (
    *("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers", "num_decoder_layers"),
    *("tie_word_embeddings", "widening", "num_blocks", "selection", "sequence", "stride"),
    *("experts", "expert_hidden", "expert_top_k"),
)


@dataclass(frozen=True)
class Accounting:
    """Costs of one configuration; FLOPs and bytes are those of one training sequence.

    `flops_forward` counts 2 for each multiply-add; `flops_train` is three times that (each product has two in
    the backward pass). `activation_bytes` is what the backward pass needs kept, in bfloat16; beside it stands
    `activation_bytes_paper`, the paper's own formula.
    """

    inputs: int
    targets: int
    parameters: dict[str, int]
    flops: dict[str, int]
    activations: dict[str, int]
    activation_bytes_paper: int
    config: AltUpT5Config = field(repr=False)

    @property
    def embedding(self) -> int:
        """Input table and output head, as the paper's tables count them."""
        return sum(self.parameters[part] for part in EMBEDDING_PARTS)

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    @property
    def flops_forward(self) -> int:
        return sum(self.flops.values())

    @property
    def flops_matrix(self) -> int:
        """The forward pass without the element-wise update rules: matrix products alone."""
        return self.flops_forward - self.flops[RULE]

    @property
    def flops_train(self) -> int:
        return 3 * self.flops_forward

    @property
    def activation_bytes(self) -> int:
        return sum(self.activations.values())

    def to_json(self) -> dict[str, Any]:
        """One flat object with the totals, then the parts and the shape they belong to."""
        return {
            **{name: getattr(self, name) for name in TOTALS},
            "parameter_parts": self.parameters,
            "flops_forward_parts": self.flops,
            "activation_bytes_parts": self.activations,
            "config": {name: getattr(self.config, name) for name in SHAPE_FIELDS},
        }


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, reduced to the lengths it works on."""

    decoder: bool
    tokens: int  # what the layer itself computes on
    state_tokens: int  # what the rule around it updates; more than `tokens` where the layer is strided
    memory: int  # encoder positions that cross-attention reads; 0 in the encoder
    strided: bool


def account(config: AltUpT5Config, inputs: int = INPUTS, targets: int = TARGETS) -> Accounting:
    """Everything about `config`, for sequences of `inputs` encoder and `targets` decoder tokens."""
    check_whole("inputs", inputs, 1)
    check_whole("targets", targets, 1)
    layers = list_layers(config, inputs, targets)
    return Accounting(
        inputs,
        targets,
        count_parameters(config, layers),
        count_flops(config, layers, targets),
        count_activations(config, layers, targets),
        activation_formula(config, layers),
        config,
    )


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
        parts["coefficients"] += _coefficients(config, layer)
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
        parts[RULE] += 2 * layer.state_tokens * (d * _rule_scalars(config, layer) + 2 * _router(config))
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
        if config.experts:
            chosen = n * config.expert_top_k
            # float32 router input and probabilities; then input, hidden and output of the experts chosen
            parts["experts"] += 4 * n * (d + config.experts) + 2 * chosen * (2 * d + config.expert_hidden)
        if _mixes_blocks(config):
            # The wide state and the layer's output. The block a whole-length layer reads is counted above.
            parts[RULE] += 2 * d * state * (k + 1 if layer.strided else k)
        if _mixes_tokens(config, layer):
            parts[RULE] += 2 * d * (n if _mixes_blocks(config) else n + state)
    return parts


def activation_formula(config: AltUpT5Config, layers: list[Layer]) -> int:
    """The paper's estimate in bytes, s·b·h·L·(34 + 5·a·s/h) + 3·s·b·h·L, for one sequence (b = 1).

    It was made for one stack of equal layers; here each layer adds its term with its own length s. The last
    term, for K = 2, is a layer's output and a wide state: read as (K + 1)·s·h for other K, nothing for K = 1.
    """
    h, a = config.layer_width, config.num_heads
    total = 0
    for layer in layers:
        total += 34 * layer.tokens * h + 5 * a * layer.tokens**2
        if _mixes_blocks(config):
            total += (config.num_blocks + 1) * layer.state_tokens * h
    return total


def _mixes_blocks(config: AltUpT5Config) -> bool:
    return config.selects_blocks and config.num_blocks > 1


def _mixes_tokens(config: AltUpT5Config, layer: Layer) -> bool:
    return layer.strided and config.sequence == "altup"


def _router(config: AltUpT5Config) -> int:
    """Weights of the router that makes dynamic coefficients, which runs on the state and on the layer's output."""
    return config.num_blocks * config.d_model if config.coefficients == "dynamic" else 0


def _coefficients(config: AltUpT5Config, layer: Layer) -> int:
    """Parameters of the rules around one layer; dynamic ones: K for each coefficient, the router and its norm."""
    scalars = _rule_scalars(config, layer)
    if config.coefficients == "static":
        return scalars
    k = config.num_blocks
    return scalars + (k - 1) * (k * k + k) + _router(config) + config.d_model


def _rule_scalars(config: AltUpT5Config, layer: Layer) -> int:
    """Coefficients of the rules around one layer: P and g of AltUp; a1, a2 and b of Sequence-AltUp."""
    k = config.num_blocks
    return (k * k + k if _mixes_blocks(config) else 0) + (3 if _mixes_tokens(config, layer) else 0)
