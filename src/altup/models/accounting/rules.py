"""What every family's layers have in common: lengths, update rules and the paper's memory formula."""

from __future__ import annotations

from dataclasses import dataclass

from altup.models.config import AltUpConfig


@dataclass(frozen=True)
class Layer:
    """One layer of a stack, reduced to the lengths it works on."""

    decoder: bool
    tokens: int  # what the layer itself computes on
    state_tokens: int  # what the rule around it updates; more than `tokens` where the layer is strided
    memory: int  # encoder positions that cross-attention reads; 0 in the encoder
    strided: bool


def activation_formula(config: AltUpConfig, layers: list[Layer]) -> int:
    """The paper's estimate in bytes, s·b·h·L·(34 + 5·a·s/h) + 3·s·b·h·L, for one sequence (b = 1).

    It was made for one stack of equal layers; here each layer adds its term with its own length s. The last
    term, for K = 2, is a layer's output and a wide state: read as (K + 1)·s·h for other K, nothing for K = 1.
    """
    h, a = config.layer_width, config.num_heads
    total = 0
    for layer in layers:
        total += 34 * layer.tokens * h + 5 * a * layer.tokens**2
        if mixes_blocks(config):
            total += (config.num_blocks + 1) * layer.state_tokens * h
    return total


def mixes_blocks(config: AltUpConfig) -> bool:
    return config.selects_blocks and config.num_blocks > 1


def mixes_tokens(config: AltUpConfig, layer: Layer) -> bool:
    return layer.strided and config.sequence == "altup"


def router_weights(config: AltUpConfig) -> int:
    """Weights of the router that makes dynamic coefficients, which runs on the state and on the layer's output."""
    return config.num_blocks * config.d_model if config.coefficients == "dynamic" else 0


def count_coefficients(config: AltUpConfig, layer: Layer) -> int:
    """Parameters of the rules around one layer; dynamic ones: K for each coefficient, the router and its norm."""
    scalars = rule_scalars(config, layer)
    if config.coefficients == "static":
        return scalars
    k = config.num_blocks
    return scalars + (k - 1) * (k * k + k) + router_weights(config) + config.d_model


def rule_scalars(config: AltUpConfig, layer: Layer) -> int:
    """Coefficients of the rules around one layer: P and g of AltUp; a1, a2 and b of Sequence-AltUp."""
    k = config.num_blocks
    return (k * k + k if mixes_blocks(config) else 0) + (3 if mixes_tokens(config, layer) else 0)


def expert_bytes(config: AltUpConfig, tokens: int) -> int:
    """What one layer's experts keep: router input and probabilities in float32, and of the experts chosen input,
    hidden layer and output."""
    if not config.experts:
        return 0
    width, chosen = config.layer_width, tokens * config.expert_top_k
    return 4 * tokens * (width + config.experts) + 2 * chosen * (2 * width + config.expert_hidden)
