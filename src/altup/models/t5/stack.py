"""T5's encoder and decoder: a list of ordinary layers and a rule for updating the state with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from altup.core.errors import UserError
from altup.kernels.attention import lay_out
from altup.kernels.dropout import dropout
from altup.models.layers import PreNormLayer
from altup.models.masks import cached_lengths, check_mask, key_mask, seen_by_query
from altup.models.rules import build_experts, build_rule, stride_layers
from altup.models.t5.config import AltUpT5Config
from altup.nn import Attention, AveragePooling, GatedFeedForward, RelativeBias, RMSNorm
from altup.nn.attention import EVERYTHING, Projected, Seen, can_share_memory, project_memory
from altup.nn.sequence import refuse_left_padding


class T5Layer(PreNormLayer):
    """x + attention, + cross-attention in the decoder, + feed-forward (and experts beside it), each pre-normed."""

    def __init__(self, config: AltUpT5Config, index: int, is_decoder: bool, strided: bool = False) -> None:
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
        self.experts = build_experts(config)
        self.leaves_last_addition = config.selects_blocks and not strided

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        seen: Seen,
        memory: Tensor | Projected | None = None,
        memory_seen: Seen = EVERYTHING,
        past_key_values: EncoderDecoderCache | None = None,
        constant_beyond: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: [batch, tokens, d]; `memory` is the encoder's output, for the decoder's layers.

        Gives x after its three updates or, where the rule does the last addition, x before the last one and that.
        """
        cache = past_key_values
        own_cache = None if cache is None else cache.self_attention_cache
        attended = self.attention(
            self.attention_norm(x), bias, seen, cache=own_cache, constant_beyond=constant_beyond
        )
        x = x + self._drop(attended)
        if self.cross_attention is not None and self.cross_norm is not None:
            attended = self.cross_attention(
                self.cross_norm(x),
                None,
                memory_seen,
                memory,
                cache=None if cache is None else cache.cross_attention_cache,
                cached=cache is not None and bool(cache.is_updated.get(self.index)),
            )
            if cache is not None:
                cache.is_updated[self.index] = True
            x = x + self._drop(attended)
        return self._add_feed_forward(x)


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
        strided = () if is_decoder else config.strided_layers
        self.layers = nn.ModuleList(
            [T5Layer(config, index, is_decoder, index in strided) for index in range(num_layers)]
        )
        # A sum of K blocks is K times as large: ε grows with it, so that the norm treats it as their mean.
        scale = config.num_blocks**2 if config.widening == "recycled" else 1
        self.final_norm = RMSNorm(config.output_width, config.layer_norm_epsilon * scale)

    def _lift(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """The first state, as blocks in the dtype that the layers compute in."""
        device = embeddings.device.type
        if torch.is_autocast_enabled(device):
            embeddings = embeddings.to(torch.get_autocast_dtype(device))
        return self.rule.lift(dropout(embeddings, self.dropout, self.training)).unbind(0)

    def compile_ends(self, **options: Any) -> None:
        """Compile what stands before the first layer and behind the last: each is one pass over the wide state."""
        self._lift = torch.compile(self._lift, **options)  # type: ignore[method-assign]
        self._finish = torch.compile(self._finish, **options)  # type: ignore[method-assign]

    def _finish(self, state: tuple[Tensor, ...]) -> Tensor:
        return dropout(self.final_norm(self.rule.lower(state)), self.dropout, self.training)


class T5Encoder(T5Stack):
    """Reads tokens or embeddings and gives [batch, tokens, output_width]; pooled sequences are shorter."""

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config, config.num_layers, is_decoder=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        self.stride = config.stride
        self.pooling = AveragePooling(config.stride) if config.sequence == "pool" else None
        self.strided = frozenset(config.strided_layers)
        stride_layers(config, self.layers)

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
        segments: Tensor | None = None,
    ) -> BaseModelOutput:
        """`segments` [batch, tokens] numbers the texts of a packed row: a token sees those of its own number."""
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

        if segments is not None:
            check_segments("segments", segments, embeddings, attention_mask)
            self._refuse_mixing()

        state = self._lift(embeddings)
        length = state[0].shape[-2]
        views = {1: self._view(length, 1, attention_mask, segments)}
        if self.strided:
            kept_mask = None if attention_mask is None else attention_mask[:, :: self.stride]
            views[self.stride] = self._view(-(-length // self.stride), self.stride, kept_mask)

        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            stride = self.stride if index in self.strided else 1
            bias, seen = views[stride]
            far = self.relative_bias.constant_beyond(stride)
            state = self.rule(state, layer, index, bias, seen, constant_beyond=far)
        output = self._finish(state)
        return BaseModelOutput(output, (*hidden, output) if output_hidden_states else None)  # type: ignore[arg-type]

    def _view(
        self, length: int, stride: int, mask: Tensor | None, segments: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        """The relative bias of tokens `stride` apart, and what they see of one another."""
        bias = self.relative_bias(length, length, stride=stride)
        if segments is not None:
            return bias, Seen(query_segments=segments, key_segments=segments)
        return bias, see_keys(mask, length, length)

    def _refuse_mixing(self) -> None:
        if self.strided or self.pooling is not None:
            raise UserError(
                "segments: strided and pooled layers mix neighbours, so texts cannot share a row; do not pack"
            )

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
        segments: Tensor | None = None,
        memory_segments: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """`segments` and `memory_segments` number the texts of packed rows, as the encoder's do."""
        state = self._lift(embeddings)
        memory = memory.to(state[0].dtype)
        queries = state[0].shape[-2]
        own_cache = None if past_key_values is None else past_key_values.self_attention_cache
        past, keys = cached_lengths(own_cache, queries)
        by_distance = self.relative_bias(queries, keys, offset=past)
        bias: Tensor | None = by_distance
        if segments is not None:
            if past_key_values is not None:
                raise UserError("decoder_segments: packed rows have no cache and cannot be generated from")
            check_segments("decoder_segments", segments, embeddings, attention_mask)
            check_segments("segments", memory_segments, memory, memory_mask)
            seen = Seen(True, segments, segments)
            memory_seen = Seen(False, segments, memory_segments)
        elif past_key_values is None and (attention_mask is None or attention_mask.dim() == 2):
            seen = see_keys(attention_mask, queries, keys, causal=True)
            memory_seen = see_keys(memory_mask, queries, memory.shape[1])
        else:
            hidden_from = hidden_keys(attention_mask, queries, keys, past, memory.device)
            lowest = torch.finfo(memory.dtype).min
            if past_key_values is None:
                # The bias apart: through reentrant checkpointing nothing inside a tuple gets a gradient.
                seen = Seen(additive=memory.new_zeros(()).masked_fill(hidden_from, lowest / 2))
            else:
                dense, bias = lay_out(by_distance, queries, keys).to(memory.dtype), None
                seen = Seen(additive=dense.masked_fill(hidden_from, lowest))
            memory_seen = Seen(additive=key_mask(memory_mask, memory.shape[1], memory.dtype))

        memories = self._memories(memory, past_key_values)
        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            state = self.rule(
                state,
                layer,
                index,
                bias,
                seen,
                memories[index],
                memory_seen,
                past_key_values=past_key_values,
                constant_beyond=self.relative_bias.constant_beyond(),
            )
        output = self._finish(state)
        return output, (*hidden, output) if output_hidden_states else None

    def _memories(self, memory: Tensor, cache: EncoderDecoderCache | None) -> Sequence[Tensor | Projected]:
        """What each layer's cross-attention is given: in training its keys and values, made for all at once.

        Not where layers are recomputed in the backward pass, which is to save just such tensors.
        """
        layers: list[Any] = [layer.cross_attention for layer in self.layers]
        recomputes = any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)
        if cache is None and self.training and not recomputes and can_share_memory(layers):
            return project_memory(memory, layers)
        return [memory] * len(layers)


def check_segments(name: str, segments: Tensor | None, tokens: Tensor, mask: Tensor | None) -> None:
    """`segments` must number `tokens` [batch, tokens, width] one by one, and say all that a mask would."""
    if mask is not None:
        raise UserError(f"give either a mask or {name} (where padding is a segment of its own)")
    if segments is None or segments.shape != tokens.shape[:2]:
        shape = None if segments is None else list(segments.shape)
        raise UserError(f"{name} of shape {shape} does not number {list(tokens.shape[:2])} tokens")


def see_keys(mask: Tensor | None, queries: int, keys: int, causal: bool = False) -> Seen:
    """What whole sequences see: the keys where `mask` [batch, keys] is not 0."""
    if mask is None:
        return Seen(causal)
    check_mask(mask, keys, keys)
    real = (mask != 0).to(torch.int32)
    return Seen(causal, torch.ones_like(real[:, :1]).expand(-1, queries), real)


def hidden_keys(mask: Tensor | None, queries: int, keys: int, past: Any, device: torch.device) -> Tensor:
    """[batch or 1, 1, queries, keys]: which keys are hidden from `queries` tokens that stand behind `past` others.

    `mask` is [batch, keys so far], or whole as generation may give it, [batch, 1, queries, keys].
    """
    places = torch.arange(queries, device=device) + past
    future = (torch.arange(keys, device=device) > places[:, None])[None, None]
    if mask is None:
        return future
    if mask.dim() == 4:
        return future | ~seen_by_query(mask)
    # Places of a static cache that are not filled yet lie in the future and are hidden as such.
    check_mask(mask, queries, keys)
    mask = F.pad(mask, (0, keys - mask.shape[1]), value=1)
    return future | (mask[:, None, None, :] == 0)
