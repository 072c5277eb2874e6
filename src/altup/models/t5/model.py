"""T5 1.1: layers, encoder and decoder, and the Hugging Face models around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from altup.core.errors import UserError
from altup.kernels.attention import lay_out
from altup.kernels.cross_entropy import IGNORED
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, refuse_attentions
from altup.models.layers import PreNormLayer, build_experts
from altup.models.masks import cached_lengths, check_segments, key_mask, see_keys, visible_keys
from altup.models.stack import Blocks, LayerInputs, LayerStack, build_rule
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.generation import ReplayedGeneration
from altup.nn import Attention, AveragePooling, GatedFeedForward, RelativeBias, RMSNorm
from altup.nn.attention import EVERYTHING, Joined, Projected, Seen, can_share_memory, project_memory
from altup.nn.layers import embed
from altup.nn.linear import Rounding
from altup.nn.rule import Sublayer
from altup.nn.sequence import refuse_left_padding

__all__ = ["AltUpSeq2SeqLMOutput", "AltUpT5EncoderModel", "AltUpT5ForConditionalGeneration"]


class T5Inputs(NamedTuple):
    """What a T5's layers are given beside x; `memory` is the encoder's output, for the decoder's layers."""

    bias: Tensor | None
    seen: Seen
    memory: Tensor | Projected | Joined | None
    memory_seen: Seen
    cache: EncoderDecoderCache | None
    constant_beyond: int | None


class T5Layer(PreNormLayer):
    """Attention, in the decoder cross-attention, and feed-forward (and experts beside it), each pre-normed."""

    def __init__(self, config: AltUpT5Config, index: int, is_decoder: bool) -> None:
        super().__init__()
        width, eps, dropout = config.layer_width, config.layer_norm_epsilon, config.dropout_rate
        shape: dict[str, Any] = {
            "num_heads": config.num_heads,
            "d_kv": config.d_kv,
            "dropout": dropout,
            "per_sequence": config.sequence_dropout,
            "index": index,
        }
        self.index = index
        self.dropout = dropout
        self.per_sequence = config.sequence_dropout
        self.attention_norm = RMSNorm(width, eps)
        self.attention = Attention(width, **shape)
        self.cross_norm: RMSNorm | None = None
        self.cross_attention: Attention | None = None
        if is_decoder:
            self.cross_norm = RMSNorm(width, eps)
            self.cross_attention = Attention(width, memory_width=config.output_width, **shape)
        self.feed_forward_norm = RMSNorm(width, eps)
        self.feed_forward = GatedFeedForward(width, config.d_ff, dropout, config.sequence_dropout)
        self.experts = build_experts(config)

    def sublayers(self) -> list[Sublayer]:
        found = [Sublayer(self.attention_norm, self._attend, self.attention)]
        if self.cross_norm is not None:
            found.append(Sublayer(self.cross_norm, self._cross_attend, self.cross_attention))
        return [*found, self.feed_forward_sublayer()]

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        seen: Seen,
        memory: Tensor | Projected | Joined | None = None,
        memory_seen: Seen = EVERYTHING,
        past_key_values: EncoderDecoderCache | None = None,
        constant_beyond: int | None = None,
        **known: Any,
    ) -> tuple[Tensor, Tensor]:
        """x: [batch, tokens, d]; `known` as of `run_sublayers`."""
        inputs = T5Inputs(bias, seen, memory, memory_seen, past_key_values, constant_beyond)
        return self.run_sublayers(x, inputs, **known)

    def _attend(self, x: Tensor, rounding: Rounding, inputs: T5Inputs) -> Tensor:
        cache = None if inputs.cache is None else inputs.cache.self_attention_cache
        options: dict[str, Any] = {"constant_beyond": inputs.constant_beyond, "rounding": rounding}
        return self.attention(x, inputs.bias, inputs.seen, cache=cache, **options)

    def _cross_attend(self, x: Tensor, rounding: Rounding, inputs: T5Inputs) -> Tensor:
        assert self.cross_attention is not None
        seen, memory, both = inputs.memory_seen, inputs.memory, inputs.cache
        if both is None:
            return self.cross_attention(x, None, seen, memory, rounding=rounding)
        cache, cached = both.cross_attention_cache, bool(both.is_updated.get(self.index))
        update = self.cross_attention(x, None, seen, memory, cache=cache, cached=cached, rounding=rounding)
        both.is_updated[self.index] = True
        return update


class T5Stack(LayerStack, nn.Module):
    """What encoder and decoder share: layers, rule, relative bias, final norm and dropout."""

    def __init__(self, config: AltUpT5Config, num_layers: int, is_decoder: bool) -> None:
        super().__init__()
        self.dropout = config.dropout_rate
        self.per_sequence = config.sequence_dropout
        self.shared_blocks = config.shared_blocks
        self.by_sublayer = config.by_sublayer
        self.rule = build_rule(config, num_layers, crosses=is_decoder)
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

    def lower(self, state: Blocks) -> Tensor:
        return self.drop(self.final_norm(self.rule.lower(state)))

    def compile_ends(self, **options: Any) -> None:
        """Compile what stands before the first layer and behind the last: each is one pass over the wide state."""
        self.lift = torch.compile(self.lift, **options)  # type: ignore[method-assign]
        self.lower = torch.compile(self.lower, **options)  # type: ignore[method-assign]


class T5Encoder(T5Stack):
    """Reads tokens or embeddings and gives [batch, tokens, output_width]; pooled sequences are shorter."""

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config, config.num_layers, is_decoder=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        self.pooling = AveragePooling(config.stride) if config.sequence == "pool" else None
        self.stride_layers(config)

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
        """`input_ids` and `attention_mask` (1 for a real token) are [batch, tokens], `inputs_embeds` are [batch,
        tokens, embedding_width]. `segments` [batch, tokens] numbers the texts of a packed row: a token sees those
        of its own number."""
        refuse_attentions(output_attentions)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        embeddings: Any = inputs_embeds
        if input_ids is not None:
            embeddings = embed(self.embed_tokens, input_ids, rounds=self.pooling is None)
        mixes_neighbours = self.strided or self.pooling is not None
        if attention_mask is not None and mixes_neighbours:
            refuse_left_padding(attention_mask)
        if self.pooling is not None:
            embeddings = self.pooling(embeddings, attention_mask)
            attention_mask = self.output_mask(attention_mask)
        if segments is not None:
            check_segments("segments", segments, embeddings, attention_mask)
            if mixes_neighbours:
                raise UserError(
                    "segments: strided and pooled layers mix neighbours, so texts cannot share a row; do not pack"
                )
        state = self.lift(embeddings)
        length = state[0].shape[-2]

        def view(stride: int) -> LayerInputs:
            """The relative bias of tokens `stride` apart, and what they see of one another."""
            kept = -(-length // stride)
            bias = self.relative_bias(kept, kept, stride=stride)
            if segments is not None:
                seen = Seen(query_segments=segments, key_segments=segments)
            else:
                mask = attention_mask
                seen = see_keys(mask if mask is None or stride == 1 else mask[:, ::stride], kept, kept)
            return LayerInputs((bias, seen), {"constant_beyond": self.relative_bias.constant_beyond(stride)})

        output, hidden = self.run_layers(state, self.inputs_by_stride(view), output_hidden_states)
        return BaseModelOutput(output, hidden)  # type: ignore[arg-type]

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
        """embeddings: [batch, tokens, embedding_width]; memory, of the encoder: [batch, inputs, output_width].

        `segments` and `memory_segments` number the texts of packed rows, as the encoder's do.
        """
        state = self.lift(embeddings)
        memory = memory.to(state[0].dtype)
        queries, cache = state[0].shape[-2], past_key_values
        past, keys = cached_lengths(None if cache is None else cache.self_attention_cache, queries)
        by_distance = self.relative_bias(queries, keys, offset=past)
        bias: Tensor | None = by_distance
        if segments is not None:
            if cache is not None:
                raise UserError("decoder_segments: packed rows have no cache and cannot be generated from")
            check_segments("decoder_segments", segments, embeddings, attention_mask)
            check_segments("segments", memory_segments, memory, memory_mask)
            seen = Seen(True, segments, segments)
            memory_seen = Seen(False, segments, memory_segments)
        elif cache is None and (attention_mask is None or attention_mask.dim() == 2):
            seen = see_keys(attention_mask, queries, keys, causal=True)
            memory_seen = see_keys(memory_mask, queries, memory.shape[1])
        else:
            hidden = ~visible_keys(attention_mask, queries, keys, past, memory.device)
            lowest = torch.finfo(memory.dtype).min
            if cache is None:
                # The bias apart: through reentrant checkpointing nothing inside a tuple gets a gradient.
                seen = Seen(additive=memory.new_zeros(()).masked_fill(hidden, lowest / 2))
            else:
                dense, bias = lay_out(by_distance, queries, keys).to(memory.dtype), None
                seen = Seen(additive=dense.masked_fill(hidden, lowest))
            memory_seen = Seen(additive=key_mask(memory_mask, memory.shape[1], memory.dtype))

        shared = {"past_key_values": cache, "constant_beyond": self.relative_bias.constant_beyond()}
        inputs = [
            LayerInputs((bias, seen, of_layer, memory_seen), shared) for of_layer in self._memories(memory, cache)
        ]
        return self.run_layers(state, inputs, output_hidden_states)

    def _memories(
        self, memory: Tensor, cache: EncoderDecoderCache | None
    ) -> Sequence[Tensor | Projected | Joined]:
        """What each layer's cross-attention is given: in training its keys and values, made for all at once.

        Not where layers are recomputed in the backward pass, which is to save just such tensors.
        """
        layers: list[Any] = [layer.cross_attention for layer in self.layers]
        recomputes = any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)
        if cache is None and self.training and not recomputes and can_share_memory(layers):
            return project_memory(memory, layers)
        return [memory] * len(layers)


@dataclass
class AltUpSeq2SeqLMOutput(SumsOutput, Seq2SeqLMOutput):
    """Hugging Face's output and, when labels are given, sums over the tokens that count."""


class AltUpT5PreTrainedModel(AltUpPreTrainedModel):
    config_class = AltUpT5Config
    base_model_prefix = "transformer"
    reads_blocks = ("lm_head.weight", "cross_attention.k.weight", "cross_attention.v.weight")
    _no_split_modules = ["T5Layer"]  # noqa: RUF012
    encoder: T5Encoder

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
        elif module is getattr(self, "lm_head", None):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value  # type: ignore[assignment]


class AltUpT5EncoderModel(AltUpT5PreTrainedModel):
    """The encoder alone: takes what `T5Encoder.forward` takes and gives [batch, tokens, output_width].

    Args:
        config: Shape and method; `AltUpT5Config.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpT5Config, AltUpT5EncoderModel
        >>> encoder = AltUpT5EncoderModel(AltUpT5Config.from_preset("tiny", "altup", k=2, vocab_size=100))
        >>> encoder(torch.randint(3, 100, (2, 12))).last_hidden_state.shape
        torch.Size([2, 12, 256])
    """

    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config)
        self.encoder = T5Encoder(config)
        self.post_init()

    def forward(self, *args: Any, return_dict: bool | None = None, **kwargs: Any) -> BaseModelOutput | tuple:
        if kwargs.get("output_hidden_states") is None:
            kwargs["output_hidden_states"] = self.config.output_hidden_states
        output = self.encoder(*args, **kwargs)
        return output if as_dict(return_dict, self.config) else output.to_tuple()


class AltUpT5ForConditionalGeneration(AltUpT5PreTrainedModel, ReplayedGeneration, GenerationMixin):  # type: ignore[misc]
    """Encoder, decoder and head: `input_ids` [batch, inputs] and `labels` [batch, targets] make a loss, and logits
    [batch, targets, vocab_size]; `generate` writes targets, on a GPU greedily in recorded steps.

    Args:
        config: Shape and method; `AltUpT5Config.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
        >>> config = AltUpT5Config.from_preset("tiny", "altup", k=2, vocab_size=100)
        >>> model = AltUpT5ForConditionalGeneration(config)
        >>> ids = torch.randint(3, 100, (2, 12))
        >>> output = model(input_ids=ids, labels=ids[:, :5])
        >>> output.logits.shape, output.loss.shape
        (torch.Size([2, 5, 100]), torch.Size([]))
        >>> model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([2, 5])
    """

    _tied_weights_keys = {"lm_head.weight": "encoder.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AltUpT5Config) -> None:
        super().__init__(config)
        self.encoder = T5Encoder(config)
        self.decoder = T5Decoder(config)
        self.lm_head = nn.Linear(config.output_width, config.vocab_size, bias=False)
        self.post_init()

    def get_encoder(self, *args: Any, **kwargs: Any) -> T5Encoder:
        return self.encoder

    def get_decoder(self) -> T5Decoder:
        return self.decoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_logits: bool = True,
        num_items_in_batch: Tensor | int | None = None,
        segments: Tensor | None = None,
        decoder_segments: Tensor | None = None,
        **kwargs: Any,
    ) -> AltUpSeq2SeqLMOutput | tuple:
        """`labels` [batch, targets] uses −100 where a token does not count. The loss is the mean over the tokens
        that do, or their sum divided by `num_items_in_batch`. `return_logits=False` spares a training loop the
        logits.

        Rows may hold several texts: `segments` [batch, inputs] and `decoder_segments` [batch, targets] number
        them, and a token sees those of its own number. Padding is a number of its own."""
        if (segments is None) != (decoder_segments is None):
            raise UserError("give segments and decoder_segments together")
        refuse_attentions(kwargs.get("output_attentions"))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids,
                attention_mask,
                inputs_embeds,
                output_hidden_states=output_hidden_states,
                segments=segments,
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs)
        memory = encoded.last_hidden_state
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self._embed_targets(decoder_input_ids, labels, decoder_segments)
        if use_cache is None:
            packed = decoder_segments is not None
            use_cache = self.config.use_cache and labels is None and not self.training and not packed
        cache = self._cache(past_key_values, use_cache)
        hidden, decoder_hidden_states = self.decoder(
            decoder_inputs_embeds,
            memory,
            decoder_attention_mask,
            self._memory_mask(attention_mask, memory),
            cache,
            output_hidden_states,
            decoder_segments,
            segments,
        )
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        output = AltUpSeq2SeqLMOutput(
            past_key_values=cache if use_cache else None,
            decoder_hidden_states=decoder_hidden_states,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=encoded.hidden_states,
            **self.answer(hidden, labels, return_logits, num_items_in_batch),
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()

    def _embed_targets(self, ids: Tensor | None, labels: Tensor | None, segments: Tensor | None) -> Tensor:
        """Embeddings of the decoder's inputs: of `ids`, or of the labels shifted right."""
        if ids is None:
            if labels is None:
                raise UserError("give decoder_input_ids, decoder_inputs_embeds or labels")
            ids = self.prepare_decoder_input_ids_from_labels(labels, segments)
        return embed(self.encoder.embed_tokens, ids, rounds=True)

    @staticmethod
    def _cache(given: Cache | None, use_cache: bool) -> EncoderDecoderCache | None:
        if given is None:
            return EncoderDecoderCache(DynamicCache(), DynamicCache()) if use_cache else None
        return given if isinstance(given, EncoderDecoderCache) else EncoderDecoderCache(given, DynamicCache())

    def _memory_mask(self, mask: Tensor | None, memory: Tensor) -> Tensor | None:
        """`mask` of the input, or already of the encoder's output where that is shorter."""
        fits = mask is not None and mask.shape[1] == memory.shape[1]
        return mask if fits else self.encoder.output_mask(mask)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor, segments: Tensor | None = None) -> Tensor:
        """Teacher forcing: the labels shifted right, behind the start token; one for each text of a packed row."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        if segments is not None:
            first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
            shifted = shifted.masked_fill(first, self.config.decoder_start_token_id)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)
