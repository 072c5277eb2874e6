"""T5's encoder and decoder: a list of ordinary layers and a rule for updating the state with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from altup.errors import UserError
from altup.models.t5.config import AltUpT5Config
from altup.nn import (
    AltUp,
    Attention,
    AveragePooling,
    GatedFeedForward,
    PartialExperts,
    RelativeBias,
    RMSNorm,
    SequenceAltUp,
    StrideAndSkip,
    Sum,
)
from altup.nn.sequence import refuse_left_padding


class T5Layer(GradientCheckpointingLayer):
    """x + attention, + cross-attention in the decoder, + feed-forward (and experts beside it), each pre-normed."""

    def __init__(self, config: AltUpT5Config, index: int, is_decoder: bool) -> None:
        super().__init__()
        width, eps, dropout = config.layer_width, config.layer_norm_epsilon, config.dropout_rate
        shape: dict[str, Any] = {
            "num_heads": config.num_heads,
            "d_kv": config.d_kv,
            "dropout": dropout,
            "index": index,
        }
        self.index = index
        self.dropout = dropout
        self.attention_norm = RMSNorm(width, eps)
        self.attention = Attention(width, **shape)
        self.cross_norm: RMSNorm | None = None
        self.cross_attention: Attention | None = None
        if is_decoder:
            self.cross_norm = RMSNorm(width, eps)
            self.cross_attention = Attention(width, memory_width=config.output_width, **shape)
        self.feed_forward_norm = RMSNorm(width, eps)
        self.feed_forward = GatedFeedForward(width, config.d_ff, dropout)
        self.experts: PartialExperts | None = None
        if config.experts:
            self.experts = PartialExperts(
                width,
                config.experts,
                config.expert_hidden,
                config.expert_top_k,
                config.expert_jitter,
                balance=config.expert_balance > 0,
            )

    def forward(
        self,
        x: Tensor,
        bias: Tensor,
        memory: Tensor | None = None,
        memory_bias: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
    ) -> Tensor:
        """x: [batch, tokens, d]; `memory` is the encoder's output, for the decoder's layers."""
        cache = past_key_values
        own_cache = None if cache is None else cache.self_attention_cache
        x = x + self._drop(self.attention(self.attention_norm(x), bias, cache=own_cache))
        if self.cross_attention is not None and self.cross_norm is not None:
            attended = self.cross_attention(
                self.cross_norm(x),
                memory_bias,
                memory,
                cache=None if cache is None else cache.cross_attention_cache,
                cached=cache is not None and bool(cache.is_updated.get(self.index)),
            )
            if cache is not None:
                cache.is_updated[self.index] = True
            x = x + self._drop(attended)
        normed = self.feed_forward_norm(x)
        update = self.feed_forward(normed)
        if self.experts is not None:
            update = update + self.experts(normed)
        return x + self._drop(update)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def build_rule(config: AltUpT5Config, num_layers: int) -> AltUp | Sum:
    if config.widening == "sum":
        return Sum(config.num_blocks)
    if config.selects_blocks:
        selection = config.selection or "alternating"
        return AltUp(config.num_blocks, num_layers, selection, recycled=config.widening == "recycled")
    return AltUp(1, num_layers)


class T5Stack(nn.Module):
    """What encoder and decoder share: layers, rule, relative bias, final norm and dropout."""

    def __init__(self, config: AltUpT5Config, num_layers: int, is_decoder: bool) -> None:
        super().__init__()
        self.dropout = config.dropout_rate
        self.rule = build_rule(config, num_layers)
        self.relative_bias = RelativeBias(
            config.num_heads,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            bidirectional=not is_decoder,
            std=config.layer_width**-0.5,
        )
        self.layers = nn.ModuleList([T5Layer(config, index, is_decoder) for index in range(num_layers)])
        # A sum of K blocks is K times as large: ε grows with it, so that the norm treats it as their mean.
        scale = config.num_blocks**2 if config.widening == "recycled" else 1
        self.final_norm = RMSNorm(config.output_width, config.layer_norm_epsilon * scale)

    def _lift(self, embeddings: Tensor) -> Tensor:
        """The first state, in the dtype that the layers compute in."""
        device = embeddings.device.type
        if torch.is_autocast_enabled(device):
            embeddings = embeddings.to(torch.get_autocast_dtype(device))
        return self.rule.lift(F.dropout(embeddings, self.dropout, self.training))

    def _finish(self, state: Tensor) -> Tensor:
        return F.dropout(self.final_norm(self.rule.lower(state)), self.dropout, self.training)


class T5Encoder(T5Stack):
    """Reads tokens or embeddings and gives [batch, tokens, output_width]; pooled sequences are shorter."""

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config, config.num_layers, is_decoder=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        self.stride = config.stride
        self.pooling = AveragePooling(config.stride) if config.sequence == "pool" else None
        self.strided = frozenset(config.strided_layers)
        wrapper = SequenceAltUp if config.sequence == "altup" else StrideAndSkip
        for index in self.strided:
            self.layers[index] = wrapper(self.layers[index], config.stride)

    @property
    def main_input_name(self) -> str:
        return "input_ids"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        if output_attentions:
            raise UserError("output_attentions=True: attention weights are never held here; leave it unset")
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None and (self.strided or self.pooling is not None):
            refuse_left_padding(attention_mask)
        if self.pooling is not None:
            embeddings = self.pooling(embeddings, attention_mask)
            attention_mask = self.output_mask(attention_mask)

        state = self._lift(embeddings)
        length = state.shape[-2]
        biases = {1: mask_keys(self.relative_bias(length, length), attention_mask)}
        if self.strided:
            kept = -(-length // self.stride)
            kept_mask = None if attention_mask is None else attention_mask[:, :: self.stride]
            biases[self.stride] = mask_keys(self.relative_bias(kept, kept, stride=self.stride), kept_mask)

        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            bias = biases[self.stride if index in self.strided else 1]
            state = self.rule(state, layer, index, bias)
        output = self._finish(state)
        return BaseModelOutput(output, (*hidden, output) if output_hidden_states else None)  # type: ignore[arg-type]

    def output_mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask of the encoder's output, given that of its input."""
        return mask if mask is None or self.pooling is None else self.pooling.pool_mask(mask)


class T5Decoder(T5Stack):
    """Reads embeddings and the encoder's output; keys and values go to a cache when one is given."""

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config, config.num_decoder_layers, is_decoder=True)

    def forward(
        self,
        embeddings: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        output_hidden_states: bool | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        state = self._lift(embeddings)
        memory = memory.to(state.dtype)
        queries = state.shape[-2]
        past, keys = _cached_lengths(past_key_values, queries)
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] < keys:
            # Places of a static cache that are not filled yet lie in the future and are hidden as such.
            attention_mask = F.pad(attention_mask, (0, keys - attention_mask.shape[1]), value=1)
        bias = mask_keys(self.relative_bias(queries, keys, offset=past), attention_mask)
        memory_bias = None
        if memory_mask is not None:
            memory_bias = mask_keys(memory.new_zeros(1, 1, 1, memory.shape[1]), memory_mask)

        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            state = self.rule(state, layer, index, bias, memory, memory_bias, past_key_values=past_key_values)
        output = self._finish(state)
        return output, (*hidden, output) if output_hidden_states else None


def mask_keys(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Hide the keys where `mask` [batch, keys] is 0.

    Generation may pass [batch, 1, queries, keys]: true where a key is seen, or 0 there and negative elsewhere.
    """
    if mask is None:
        return bias
    if mask.dim() == 4:
        hidden = ~mask if mask.dtype == torch.bool else mask < 0
    else:
        if mask.shape[1] != bias.shape[-1]:
            raise UserError(f"attention_mask is {mask.shape[1]} long for {bias.shape[-1]} tokens; they must agree")
        hidden = mask[:, None, None, :] == 0
    return bias.masked_fill(hidden, torch.finfo(bias.dtype).min)


def _cached_lengths(cache: EncoderDecoderCache | None, queries: int) -> tuple[Any, int]:
    """How many tokens came before the queries, and how many keys attention will see.

    A static cache shows all its places; those not yet filled lie in the future and are hidden as such.
    """
    if cache is None:
        return 0, queries
    own = cache.self_attention_cache
    past = own.get_seq_length()
    keys, _ = own.get_mask_sizes(queries, 0)
    # A static cache counts in place: what was read here must not move on with it.
    return past.clone() if isinstance(past, Tensor) else past, keys
