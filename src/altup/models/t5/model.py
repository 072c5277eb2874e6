"""T5 1.1 as Hugging Face models: encoder-decoder with a head, and the encoder alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from altup.core.errors import UserError
from altup.kernels.cross_entropy import IGNORED, head_sums, token_sums
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, loss_fields, refuse_attentions
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.generation import ReplayedGeneration
from altup.models.t5.stack import T5Decoder, T5Encoder
from altup.nn.layers import is_bare


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
    """The encoder alone: [batch, tokens, output_width]."""

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
    """Encoder, decoder and head."""

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
        past_key_values: EncoderDecoderCache | None = None,
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
        """`labels` uses −100 where a token does not count. The loss is the mean over the tokens that do, or their
        sum divided by `num_items_in_batch`. `return_logits=False` spares a training loop the logits.

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

        if decoder_inputs_embeds is None:
            if decoder_input_ids is None:
                if labels is None:
                    raise UserError("give decoder_input_ids, decoder_inputs_embeds or labels")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels, decoder_segments)
            decoder_inputs_embeds = self.encoder.embed_tokens(decoder_input_ids)

        if use_cache is None:
            packed = decoder_segments is not None
            use_cache = self.config.use_cache and labels is None and not self.training and not packed
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        elif past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())

        hidden, decoder_hidden_states = self.decoder(
            decoder_inputs_embeds,
            encoded.last_hidden_state,
            decoder_attention_mask,
            self._memory_mask(attention_mask, encoded.last_hidden_state),
            past_key_values,
            output_hidden_states,
            decoder_segments,
            segments,
        )
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        logits = sums = None
        if labels is not None and not return_logits and is_bare(self.lm_head):
            sums = head_sums(hidden, self.lm_head.weight, labels, self.config.z_loss)
        else:
            logits = self.lm_head(hidden)
            if labels is not None:
                sums = token_sums(logits, labels, self.config.z_loss)
        if sums is not None:
            sums = self.with_balance_loss(sums)
        output = AltUpSeq2SeqLMOutput(
            logits=logits if return_logits else None,
            past_key_values=past_key_values if use_cache else None,
            decoder_hidden_states=decoder_hidden_states,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            **loss_fields(sums, num_items_in_batch),
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()

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


__all__ = ["AltUpSeq2SeqLMOutput", "AltUpT5EncoderModel", "AltUpT5ForConditionalGeneration"]
