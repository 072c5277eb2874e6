"""T5 1.1 as Hugging Face models: encoder-decoder with a head, and the encoder alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from altup.errors import UserError
from altup.kernels.cross_entropy import IGNORED, TokenSums, token_sums
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.stack import T5Decoder, T5Encoder
from altup.nn import PartialExperts


@dataclass
class AltUpSeq2SeqLMOutput(Seq2SeqLMOutput):
    """Hugging Face's output and, when labels are given, sums over the tokens that count.

    `loss_sum` is what a training loop differentiates: divided by the tokens of the whole batch it gives the
    same gradient however the batch is cut into pieces.
    """

    loss_sum: Tensor | None = None
    nll_sum: Tensor | None = None
    num_correct: Tensor | None = None
    num_tokens: Tensor | None = None


class AltUpT5PreTrainedModel(PreTrainedModel):
    config_class = AltUpT5Config
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["T5Layer"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["rule", "update", "router"]  # noqa: RUF012
    encoder: T5Encoder

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
        elif module is getattr(self, "lm_head", None):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif hasattr(module, "reset_parameters") and not isinstance(module, nn.Linear):
            _reset_missing(module)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights at large: the coefficients are float32 in any model."""
        return self.encoder.embed_tokens.weight.dtype

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside its own tree, Hugging Face skips modules whose parameters all sit in children.
        super()._initialize_weights(module, is_custom_code=False)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As Hugging Face's, but weights that do not fit the config are an error that says which field differs,
        unless `ignore_mismatched_sizes` is set."""
        place = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(
            place, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
        model, info = loaded
        wrong = [str(key[0]) for key in info["mismatched_keys"]] + sorted(info["missing_keys"])
        if wrong and not ignore_mismatched_sizes:
            where = {k: kwargs[k] for k in ("subfolder", "revision", "token", "cache_dir") if k in kwargs}
            stored = cls.config_class.from_pretrained(place, **where).to_dict()
            differing = [
                f"{field}={value!r} where the checkpoint has {stored[field]!r}"
                for field, value in model.config.to_dict().items()
                if field in stored and stored[field] != value and field not in ("dtype", "architectures")
                if not field.startswith("_")
            ]
            remedy = (
                f"{'; '.join(differing)}; load it with the config saved beside it"
                if differing
                else f"the file is not whole, or not that of a {cls.__name__}"
            )
            raise UserError(
                f"{place}: {len(wrong)} weights are of another shape or missing, first {wrong[0]}; {remedy}"
            )
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value  # type: ignore[assignment]


def _reset_missing(module: nn.Module) -> None:
    """Initialise a module's parameters, except those that were loaded from a checkpoint."""
    loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
    module.reset_parameters()  # type: ignore[operator]
    for parameter, value in loaded:
        parameter.copy_(value)


def _as_dict(asked: bool | None, config: PreTrainedConfig) -> bool:
    return bool(config.return_dict if asked is None else asked)


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
        return output if _as_dict(return_dict, self.config) else output.to_tuple()


class AltUpT5ForConditionalGeneration(AltUpT5PreTrainedModel, GenerationMixin):
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

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

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
        **kwargs: Any,
    ) -> AltUpSeq2SeqLMOutput | tuple:
        """`labels` uses −100 where a token does not count. The loss is the mean over the tokens that do, or their
        sum divided by `num_items_in_batch`. `return_logits=False` spares a training loop the logits."""
        if kwargs.get("output_attentions"):
            raise UserError("output_attentions=True: attention weights are never held here; leave it unset")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids, attention_mask, inputs_embeds, output_hidden_states=output_hidden_states
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            encoded = BaseModelOutput(*encoder_outputs)

        if decoder_inputs_embeds is None:
            if decoder_input_ids is None:
                if labels is None:
                    raise UserError("give decoder_input_ids, decoder_inputs_embeds or labels")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            decoder_inputs_embeds = self.encoder.embed_tokens(decoder_input_ids)

        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
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
        )
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        logits = self.lm_head(hidden)

        sums = loss = None
        if labels is not None:
            sums = self._with_balance_loss(token_sums(logits, labels, self.config.z_loss))
            loss = sums.loss / (num_items_in_batch if num_items_in_batch is not None else sums.tokens.clamp(min=1))
        output = AltUpSeq2SeqLMOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits if return_logits else None,
            past_key_values=past_key_values if use_cache else None,
            decoder_hidden_states=decoder_hidden_states,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            loss_sum=None if sums is None else sums.loss,
            nll_sum=None if sums is None else sums.nll,
            num_correct=None if sums is None else sums.correct,
            num_tokens=None if sums is None else sums.tokens,
        )
        return output if _as_dict(return_dict, self.config) else output.to_tuple()

    def _memory_mask(self, mask: Tensor | None, memory: Tensor) -> Tensor | None:
        """`mask` of the input, or already of the encoder's output where that is shorter."""
        fits = mask is not None and mask.shape[1] == memory.shape[1]
        return mask if fits else self.encoder.output_mask(mask)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Teacher forcing: the labels shifted right, behind the start token."""
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)

    def _with_balance_loss(self, sums: TokenSums) -> TokenSums:
        """Add the experts' mean balance loss, scaled by the tokens as the rest of `loss_sum` is."""
        if not (self.training and self.config.experts and self.config.expert_balance):
            return sums
        experts = [m for m in self.modules() if isinstance(m, PartialExperts)]
        mean = torch.stack([m.balance_loss for m in experts if m.balance_loss is not None]).mean()
        for module in experts:
            module.balance_loss = None
        if torch.is_grad_enabled() and not mean.requires_grad:
            raise UserError(
                f"expert_balance={self.config.expert_balance} gets no gradient through reentrant checkpointing; "
                "call gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return sums._replace(loss=sums.loss + self.config.expert_balance * mean * sums.tokens)


__all__ = ["AltUpSeq2SeqLMOutput", "AltUpT5EncoderModel", "AltUpT5ForConditionalGeneration"]
