"""A modern decoder: its layers, and the Hugging Face models around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from altup.core.errors import UserError
from altup.kernels.cross_entropy import IGNORED
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, refuse_attentions
from altup.models.decoder.config import AltUpDecoderConfig
from altup.models.layers import PreNormLayer, build_experts
from altup.models.masks import causal_mask, check_segments, packed_mask, segment_positions, token_positions
from altup.models.stack import Blocks, LayerInputs, LayerStack, build_rule
from altup.nn import RMSNorm
from altup.nn.attention import GroupedAttention
from altup.nn.layers import SwiGLU, embed
from altup.nn.linear import Rounding
from altup.nn.positions import rotation
from altup.nn.rule import Sublayer

__all__ = ["AltUpCausalLMOutput", "AltUpDecoderForCausalLM", "AltUpDecoderModel"]


@dataclass
class AltUpCausalLMOutput(SumsOutput, CausalLMOutputWithPast):
    """Hugging Face's output and, when labels are given, sums over the tokens that count."""


class DecoderLayer(PreNormLayer):
    """Attention and feed-forward (and experts beside it), each pre-normed."""

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

    def sublayers(self) -> list[Sublayer]:
        return [Sublayer(self.attention_norm, self._attend, self.attention), self.feed_forward_sublayer()]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        past_key_values: Cache | None = None,
        **known: Any,
    ) -> tuple[Tensor, Tensor]:
        """x: [batch, tokens, d]; without a mask, only the future is hidden; `known` as of `run_sublayers`."""
        return self.run_sublayers(x, mask, rotation, past_key_values, **known)

    def _attend(
        self, x: Tensor, rounding: Rounding, mask: Tensor | None, rotation: Any, cache: Cache | None
    ) -> Tensor:
        return self.attention(x, mask, rotation, cache, causal=True, rounding=rounding)


class AltUpDecoderPreTrainedModel(AltUpPreTrainedModel):
    config_class = AltUpDecoderConfig
    config: AltUpDecoderConfig
    base_model_prefix = "model"
    # The head reads K blocks; sharing out the norm before it instead leaves a tied head tied.
    reads_blocks = ("final_norm.weight",)
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embed_tokens  # type: ignore[return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.embed_tokens = value


class AltUpDecoderModel(LayerStack, AltUpDecoderPreTrainedModel):
    """The stack alone: `input_ids` [batch, tokens] → [batch, tokens, output_width].

    Args:
        config: Shape and method; `AltUpDecoderConfig.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpDecoderConfig, AltUpDecoderModel
        >>> stack = AltUpDecoderModel(AltUpDecoderConfig.from_preset("tiny", "altup", k=2, vocab_size=100))
        >>> stack(torch.randint(3, 100, (2, 12))).last_hidden_state.shape
        torch.Size([2, 12, 256])
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: AltUpDecoderConfig) -> None:
        super().__init__(config)
        self.dropout = config.dropout_rate
        self.shared_blocks = config.shared_blocks
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width)
        # The mean of Recycled-AltUp's blocks: to the norm behind it the same as their sum, without its larger ε.
        self.by_sublayer = config.by_sublayer
        self.rule = build_rule(config, config.num_layers, lowering="mean")
        self.layers = nn.ModuleList([DecoderLayer(config, index) for index in range(config.num_layers)])
        self.final_norm = RMSNorm(config.output_width, config.layer_norm_epsilon)
        self.post_init()

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
        segments: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """`attention_mask` [batch, past + tokens] is 1 for real tokens; padding may be on either side, and tokens
        are placed without counting it unless `position_ids` says otherwise. `segments` [batch, tokens] number the
        texts of packed rows, each of which is read as if it had a row of its own."""
        refuse_attentions(output_attentions)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        embeddings: Any = inputs_embeds
        if input_ids is not None:
            embeddings = embed(self.embed_tokens, input_ids, rounds=True)
        state = self.lift(embeddings)
        device, queries = embeddings.device, embeddings.shape[1]
        if segments is not None:
            check_segments("segments", segments, embeddings, attention_mask)
            attention_mask, use_cache, past_key_values = packed_mask(segments), False, None
            position_ids = segment_positions(segments) if position_ids is None else position_ids
        mask, past = causal_mask(attention_mask, queries, past_key_values, state[0].dtype, device)
        if position_ids is None:
            position_ids = token_positions(attention_mask, queries, past, device)
        turn = rotation(position_ids, self.config.d_kv, self.config.rope_theta)
        inputs = [LayerInputs((mask, turn), {"past_key_values": past_key_values})] * len(self.layers)
        output, hidden = self.run_layers(state, inputs, output_hidden_states)
        result = BaseModelOutputWithPast(
            output,  # type: ignore[arg-type]
            past_key_values=past_key_values if use_cache else None,
            hidden_states=hidden,  # type: ignore[arg-type]
        )
        return result if as_dict(return_dict, self.config) else result.to_tuple()

    def lower(self, state: Blocks) -> Tensor:
        return self.final_norm(self.rule.lower(state))


class AltUpDecoderForCausalLM(AltUpDecoderPreTrainedModel, GenerationMixin):
    """The stack and the head that names the next token: `input_ids` and `labels` [batch, tokens] make a loss, and
    logits [batch, tokens, vocab_size]; `generate` writes on.

    Args:
        config: Shape and method; `AltUpDecoderConfig.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpDecoderConfig, AltUpDecoderForCausalLM
        >>> config = AltUpDecoderConfig.from_preset("tiny", "altup", k=2, vocab_size=100)
        >>> model = AltUpDecoderForCausalLM(config)
        >>> ids = torch.randint(3, 100, (2, 12))
        >>> model(input_ids=ids, labels=ids).logits.shape
        torch.Size([2, 12, 100])
        >>> model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([2, 16])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AltUpDecoderConfig) -> None:
        super().__init__(config)
        self.model = AltUpDecoderModel(config)
        self.lm_head = nn.Linear(config.output_width, config.vocab_size, bias=False)
        self.post_init()

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
        segments: Tensor | None = None,
        **kwargs: Any,
    ) -> AltUpCausalLMOutput | tuple:
        """Two ways to give the answers, both with −100 where a token does not count, as Hugging Face has them:

        `labels` [batch, tokens] are the inputs again, and `labels[t + 1]` is what token t is to predict: they are
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
            segments=segments,
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
        output = AltUpCausalLMOutput(
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            **self.answer(hidden, shift_labels, return_logits, num_items_in_batch),
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()
