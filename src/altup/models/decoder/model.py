"""A modern decoder as Hugging Face models: with its head, and the stack alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from altup.core.errors import UserError
from altup.kernels.cross_entropy import IGNORED, head_sums, token_sums
from altup.kernels.dropout import dropout
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, loss_fields, refuse_attentions
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.layers import PreNormLayer
from altup.models.masks import causal_mask, token_positions
from altup.models.rules import build_experts, build_rule
from altup.nn import RMSNorm
from altup.nn.attention import GroupedAttention
from altup.nn.layers import SwiGLU, is_bare
from altup.nn.positions import rotation


@dataclass
class AltUpCausalLMOutput(SumsOutput, CausalLMOutputWithPast):
    """Hugging Face's output and, when labels are given, sums over the tokens that count."""


class DecoderLayer(PreNormLayer):
    """x + attention, + feed-forward (and experts beside it), each pre-normed."""

    def __init__(self, config: AltUpDecoderConfig, index: int) -> None:
        super().__init__()
        width, eps = config.layer_width, config.layer_norm_epsilon
        self.dropout = config.dropout_rate
        self.attention_norm = RMSNorm(width, eps)
        self.attention = GroupedAttention(
            width,
            config.num_heads,
            config.d_kv,
            config.num_kv_heads,
            dropout=config.attention_dropout,
            index=index,
        )
        self.feed_forward_norm = RMSNorm(width, eps)
        self.feed_forward = SwiGLU(width, config.d_ff)
        self.experts = build_experts(config)
        self.leaves_last_addition = config.selects_blocks

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        past_key_values: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: [batch, tokens, d]; without a mask, only the future is hidden.

        Gives x after both updates or, where the rule does the last addition, x before the last one and that.
        """
        attended = self.attention(self.attention_norm(x), mask, rotation, past_key_values, causal=True)
        x = x + self._drop(attended)
        return self._add_feed_forward(x)


class AltUpDecoderPreTrainedModel(AltUpPreTrainedModel):
    config_class = AltUpDecoderConfig
    config: AltUpDecoderConfig
    base_model_prefix = "model"
    # The head reads K blocks; dividing the norm before it instead leaves a tied head tied.
    reads_blocks = ("final_norm.weight",)
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)


class AltUpDecoderModel(AltUpDecoderPreTrainedModel):
    """The stack alone: [batch, tokens, output_width]."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: AltUpDecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        # The mean of Recycled-AltUp's blocks: to the norm behind it the same as their sum, without its larger ε.
        self.rule = build_rule(config, config.num_layers, lowering="mean")
        self.layers = nn.ModuleList([DecoderLayer(config, index) for index in range(config.num_layers)])
        self.final_norm = RMSNorm(config.output_width, config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """`attention_mask` [batch, past + tokens] is 1 for real tokens; padding may be on either side, and tokens
        are placed without counting it unless `position_ids` says otherwise."""
        refuse_attentions(output_attentions)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        device, queries = embeddings.device, embeddings.shape[1]
        if torch.is_autocast_enabled(device.type):
            embeddings = embeddings.to(torch.get_autocast_dtype(device.type))
        mask, past = causal_mask(attention_mask, queries, past_key_values, embeddings.dtype, device)
        if position_ids is None:
            position_ids = token_positions(attention_mask, queries, past, device)
        turn = rotation(position_ids, self.config.d_kv, self.config.rope_theta)

        state = self.rule.lift(dropout(embeddings, self.config.dropout_rate, self.training)).unbind(0)
        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            state = self.rule(state, layer, index, mask, turn, past_key_values=past_key_values)
        output = self.final_norm(self.rule.lower(state))
        result = BaseModelOutputWithPast(
            output,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*hidden, output) if output_hidden_states else None,  # type: ignore[arg-type]
        )
        return result if as_dict(return_dict, self.config) else result.to_tuple()


class AltUpDecoderForCausalLM(AltUpDecoderPreTrainedModel, GenerationMixin):
    """The stack and the head that names the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AltUpDecoderConfig) -> None:
        super().__init__(config)
        self.model = AltUpDecoderModel(config)
        self.lm_head = nn.Linear(config.output_width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        return_logits: bool = True,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> AltUpCausalLMOutput | tuple:
        """Two ways to give the answers, both with −100 where a token does not count, as Hugging Face has them:

        `labels` [batch, tokens] are the inputs again, and `labels[t + 1]` is what token t must foretell: they are
        shifted here. `shift_labels` [batch, tokens] are shifted already: `shift_labels[t]` belongs to token t.
        Where both are given, the second counts. The loss is the mean over the tokens that count, or their sum
        divided by `num_items_in_batch`.
        """
        # Not in the signature: for Trainer every argument named so is a label that each batch must have.
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        if use_cache is None and (labels is not None or shift_labels is not None):
            use_cache = False
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            output_attentions,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = hidden[:, keep]
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if shift_labels is not None and shift_labels.shape != hidden.shape[:-1]:
            raise UserError(
                f"labels of shape {tuple(shift_labels.shape)} do not fit logits for {tuple(hidden.shape[:-1])}; "
                "give one label a token, and leave logits_to_keep unset"
            )
        logits = sums = None
        if shift_labels is not None and not return_logits and is_bare(self.lm_head):
            sums = head_sums(hidden, self.lm_head.weight, shift_labels, self.config.z_loss)
        else:
            logits = self.lm_head(hidden)
            if shift_labels is not None:
                sums = token_sums(logits, shift_labels, self.config.z_loss)
        if sums is not None:
            sums = self.with_balance_loss(sums)
        output = AltUpCausalLMOutput(
            logits=logits if return_logits else None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            **loss_fields(sums, num_items_in_batch),
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()


__all__ = ["AltUpCausalLMOutput", "AltUpDecoderForCausalLM", "AltUpDecoderModel"]
