"""What a configuration costs, from the configuration alone: parameters, FLOPs and activation memory.

Of altup's models nothing is built: every number is a closed form over the layers, so XL takes as long as tiny. The
parts are kept apart, because where a cost comes from matters as much as its sum. docs/accounting.md explains each
item.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from altup.core.errors import UserError, check_whole
from altup.core.hardware import host_memory
from altup.models.config import AltUpConfig
from altup.models.families import Family, family_of
from altup.models.methods.registry import Layer, Method

__all__ = ["INPUTS", "TARGETS", "Accounting", "account", "list_layers"]

INPUTS, TARGETS = 512, 114  # of one pretraining example of T5: 568 raw tokens after span corruption

Counts = dict[str, int]
EMBEDDING_PARTS = ("input_table", "output_head")
RULE = Method.cost_part
TOTALS = (
    *("embedding", "non_embedding", "total", "flops_forward", "flops_matrix", "flops_train"),
    *("activation_bytes", "activation_bytes_paper", "inputs", "targets"),
)
SHAPE_FIELDS = (
    *("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_kv_heads", "num_layers", "num_decoder_layers"),
    *("tie_word_embeddings", "widening", "num_blocks", "selection", "coefficients", "sequence", "stride"),
    *("experts", "expert_hidden", "expert_top_k"),
)
# Parts that only some families have.
OPTIONAL_PARTS = {
    *("cross_attention", "cross_attention_projections", "cross_attention_scores", "relative_bias"),
    *("positions_and_types", "head_transform"),
}


@dataclass(frozen=True)
class Accounting:
    """Costs of one configuration; FLOPs and bytes are those of one training sequence.

    `targets` are the tokens that the head answers for: T5's decoder's, BERT's masked ones, all of a decoder's.

    `flops_forward` counts 2 for each multiply-add; `flops_train` is three times that (each product has two in
    the backward pass). `activation_bytes` is what the backward pass needs kept, in bfloat16; beside it stands
    `activation_bytes_paper`, the paper's own formula.
    """

    inputs: int
    targets: int
    parameters: dict[str, int]
    flops: dict[str, int]
    activations: dict[str, int]
    activation_bytes_paper: int | None  # of altup's models
    config: PreTrainedConfig = field(repr=False)

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
        return self.flops_forward - self.flops.get(RULE, 0)

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
            "config": {name: getattr(self.config, name) for name in SHAPE_FIELDS if hasattr(self.config, name)},
        }


def account(config: PreTrainedConfig, inputs: int = INPUTS, targets: int | None = None) -> Accounting:
    """Everything about `config`, for sequences of `inputs` tokens.

    `targets` are T5's decoder tokens (114 unless given), or the tokens that BERT's head answers for (15 %
    unless given). A decoder answers for all of its inputs, whatever `targets` says.

    A language model of transformers is run with fake tensors, which hold no numbers: without AltUp's parts.

    Args:
        config: Of any of altup's models, or of a language model of transformers.
        inputs: Input tokens of a sequence.
        targets: Target tokens of a sequence.

    Returns:
        Parameters, FLOPs and activation bytes, in all and by part.

    Examples:
        >>> import altup
        >>> base = altup.account(altup.AltUpT5Config.from_preset("base"))
        >>> wide = altup.account(altup.AltUpT5Config.from_preset("base", "altup", k=2))
        >>> f"{wide.flops_forward / base.flops_forward:.3f} times the FLOPs"
        '1.142 times the FLOPs'
    """
    check_whole("inputs", inputs, 1)
    if not isinstance(config, AltUpConfig):
        return _account_foreign(config, inputs, targets)
    found = _family(config)
    if targets is None or found.objective == "causal":
        targets = found.default_targets(inputs)
    check_whole("targets", targets, 1)
    layers = list_layers(config, inputs, targets)

    def own(parts: Counts) -> Counts:
        return {name: number for name, number in parts.items() if number or name not in OPTIONAL_PARTS}

    return Accounting(
        inputs,
        targets,
        own(count_parameters(config, layers)),
        own(count_flops(config, layers, targets)),
        own(count_activations(config, layers, targets)),
        activation_formula(config, layers),
        config,
    )


def _family(config: AltUpConfig) -> Family:
    found = family_of(config)
    assert found is not None
    return found


def _account_foreign(config: PreTrainedConfig, inputs: int, targets: int | None) -> Accounting:
    from altup.models.foreign_accounting import count_foreign

    if not config.is_encoder_decoder:
        targets = inputs
    elif targets is None:
        targets = TARGETS
    check_whole("targets", targets, 1)
    costs = count_foreign(config, inputs, targets)
    return Accounting(inputs, targets, costs.parameters, costs.flops, costs.activations, None, config)


def refuse_too_large(config: AltUpConfig, shards: int = 1) -> None:
    """UserError, before anything is built, where one of the shards of float32 weights alone exceeds this machine's
    memory."""
    needed, there = 4 * account(config).total // shards, host_memory()
    if needed > there:
        raise UserError(
            f"the model has {account(config).total:,} parameters: {needed / 2**30:,.0f} GiB of weights, where "
            f"this machine has {there / 2**30:,.0f} GiB of memory; check its sizes (`altup params` counts them)"
        )


def list_layers(config: AltUpConfig, inputs: int, targets: int) -> list[Layer]:
    """Every layer of all stacks with its lengths; a stride keeps ⌈length / stride⌉ tokens."""
    kept = -(-inputs // config.stride)
    state = kept if config.sequence_method.shortens else inputs
    found = _family(config)
    layers = [
        Layer(False, kept if strided else state, state, 0, strided, found.keeps_output)
        for strided in (i in config.strided_layers for i in range(config.num_layers))
    ]
    return [*layers, *found.more_layers(config, targets, state)]


def count_parameters(config: AltUpConfig, layers: list[Layer]) -> Counts:
    """Parameters by part."""
    d, f, out = config.layer_width, config.d_ff, config.output_width
    queries, keys = attention_widths(config)
    found = _family(config)
    parts = {
        "input_table": config.vocab_size * config.embedding_width,
        "output_head": 0 if config.tie_word_embeddings else config.vocab_size * out,
        "positions_and_types": 0,
        "self_attention": 0,
        "cross_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        "norms": 0,
        "head_transform": 0,
        "relative_bias": 0,
        "coefficients": 0,
        **found.end_parameters(config),
    }
    biases = int(found.has_biases)
    for layer in layers:
        parts["self_attention"] += 2 * d * queries + 2 * d * keys + biases * (queries + 2 * keys + d)
        parts["feed_forward"] += found.feed_forward_maps * d * f + biases * (f + d)
        parts["norms"] += 2 * d * (1 + biases)
        if layer.decoder:
            parts["cross_attention"] += 2 * d * queries + 2 * out * keys
            parts["norms"] += d
        for method in config.methods:
            parts[method.parameter_part] += method.parameters(config, layer)
    return parts


def count_flops(config: AltUpConfig, layers: list[Layer], targets: int) -> Counts:
    """Forward FLOPs of one sequence by part, 2 for each multiply-add.

    Attention is counted over all pairs, causal or not. Norms, softmax, activation functions, residual and
    pooling additions and table look-ups are left out. The rules are counted in their fused form: for each of
    a token's d columns K² + K multiply-adds for K blocks, and 3 for Sequence-AltUp. Fixed coefficients are a few
    additions, and left out too.
    """
    d, out = config.layer_width, config.output_width
    queries, keys = attention_widths(config)
    found = _family(config)
    parts = {
        "self_attention_projections": 0,
        "self_attention_scores": 0,
        "cross_attention_projections": 0,
        "cross_attention_scores": 0,
        "feed_forward": 0,
        "experts": 0,
        "head_transform": 0,
        "output_head": 2 * targets * out * config.vocab_size,
        RULE: 0,
        **found.head_flops(config, targets),
    }
    for layer in layers:
        n, memory = layer.tokens, layer.memory
        parts["self_attention_projections"] += 2 * n * 2 * d * (queries + keys)
        parts["self_attention_scores"] += 2 * n * n * 2 * queries
        parts["feed_forward"] += 2 * n * found.feed_forward_maps * d * config.d_ff
        if layer.decoder:
            parts["cross_attention_projections"] += 2 * (n * 2 * d * queries + memory * 2 * out * keys)
            parts["cross_attention_scores"] += 2 * n * memory * 2 * queries
        for method in config.methods:
            parts[method.cost_part] += method.flops(config, layer)
    return parts


def count_activations(config: AltUpConfig, layers: list[Layer], targets: int) -> Counts:
    """Bytes that the forward pass of one sequence leaves for the backward pass, by part.

    Every tensor that some derivative reads is kept once, in bfloat16 (2 bytes) unless said otherwise: the
    input and the output of each norm; queries, keys, values and output of fused attention with its float32
    log-sum-exp (never the scores); the outputs of wi_0, GELU and wi_1 and their product (of BERT what GELU reads
    and gives); for an update rule the state and the layer's output. No dropout, no recomputation. What a whole
    batch shares, the relative bias, is left out.
    """
    d, out, heads = config.layer_width, config.output_width, config.num_heads
    queries, keys = attention_widths(config)
    found = _family(config)
    ends = found.end_tokens(layers[0].state_tokens, targets)
    parts = {
        "norm_inputs": 2 * ends * out,
        "norm_outputs": 2 * ends * out,
        "self_attention": 0,
        "cross_attention": 0,
        "feed_forward": 0,
        "experts": 0,
        "head_transform": 0,
        RULE: 0,
        "logits": 4 * targets * config.vocab_size,  # float32, as the loss reads them
        **found.head_activations(config, targets),
    }
    for layer in layers:
        n = layer.tokens
        norms = 3 if layer.decoder else 2
        parts["norm_inputs"] += 2 * norms * n * d
        parts["norm_outputs"] += 2 * norms * n * d
        parts["self_attention"] += 2 * n * (2 * queries + 2 * keys) + 4 * n * heads
        if layer.decoder:
            parts["cross_attention"] += 2 * (n * 2 * queries + layer.memory * 2 * keys) + 4 * n * heads
        parts["feed_forward"] += 2 * n * found.feed_forward_kept * config.d_ff
        for method in config.methods:
            parts[method.cost_part] += method.activation_bytes(config, layer)
    return parts


def activation_formula(config: AltUpConfig, layers: list[Layer]) -> int:
    """The paper's estimate in bytes, s·b·h·L·(34 + 5·a·s/h) + 3·s·b·h·L, for one sequence (b = 1).

    It was made for one stack of equal layers; here each layer adds its term with its own length s. The last
    term, for K = 2, is a layer's output and a wide state: read as (K + 1)·s·h for other K, nothing for K = 1.
    """
    h, a = config.layer_width, config.num_heads
    total = 0
    for layer in layers:
        total += 34 * layer.tokens * h + 5 * a * layer.tokens**2
        if config.mixes_blocks:
            sites = config.widening_method.sites_per_layer(config, layer.decoder)
            total += (config.num_blocks + 1) * layer.state_tokens * h * sites
    return total


def attention_widths(config: Any) -> tuple[int, int]:
    """Of all queries, and of all keys (or values)."""
    return config.num_heads * config.d_kv, getattr(config, "num_kv_heads", config.num_heads) * config.d_kv
