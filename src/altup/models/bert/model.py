"""BERT as Hugging Face models: with the masked-language-model head, and the encoder alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from altup.kernels import token_sums
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, loss_fields, refuse_attentions
from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.stack import BertEmbeddings, BertHead, BertLayer
from altup.models.masks import key_mask
from altup.models.rules import build_rule, stride_layers
from altup.nn import AltUp
from altup.nn.sequence import refuse_left_padding


@dataclass
class AltUpMaskedLMOutput(SumsOutput, MaskedLMOutput):
    """Hugging Face's output and, when labels are given, sums over the tokens that count."""


class AltUpBertPreTrainedModel(AltUpPreTrainedModel):
    config_class = AltUpBertConfig
    config: AltUpBertConfig
    base_model_prefix = "bert"
    # The decoder reads K blocks too; dividing the norm before it instead leaves it tied to the input table.
    reads_blocks = ("head.transform.weight", "head.norm.weight", "head.norm.bias")
    _no_split_modules = ["BertLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class AltUpBertModel(AltUpBertPreTrainedModel):
    """The encoder alone: [batch, tokens, output_width]."""

    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        # Sum has added its embeddings up before their norm and is dense here. Recycled-AltUp averages its
        # blocks: no norm follows that would undo a sum's scale.
        num_layers = config.num_layers
        self.rule: Any = (
            AltUp(1, num_layers) if config.widening == "sum" else build_rule(config, num_layers, lowering="mean")
        )
        self.layers = nn.ModuleList([BertLayer(config, index) for index in range(num_layers)])
        self.strided = frozenset(config.strided_layers)
        stride_layers(config, self.layers)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.words = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple:
        """`attention_mask` is 1 for real tokens; rows of different lengths are padded on either side, for
        strided layers on the right."""
        refuse_attentions(output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        embeddings = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        device = embeddings.device.type
        if torch.is_autocast_enabled(device):
            embeddings = embeddings.to(torch.get_autocast_dtype(device))
        masks = self._masks(attention_mask, embeddings)

        state = self.rule.lift(embeddings).unbind(0)
        hidden = []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden.append(self.rule.lower(state))
            state = self.rule(state, layer, index, masks[index in self.strided])
        output = self.rule.lower(state)
        states = (*hidden, output) if output_hidden_states else None
        result = BaseModelOutput(output, states)
        return result if as_dict(return_dict, self.config) else result.to_tuple()

    def _masks(self, mask: Tensor | None, embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """For layers that see all tokens, and for those that see every `stride`-th."""
        whole = key_mask(mask, embeddings.shape[1], embeddings.dtype)
        if whole is None or not self.strided:
            return whole, None
        stride = self.config.stride
        if mask is not None and mask.dim() == 2:
            refuse_left_padding(mask)
        rows = stride if whole.shape[-2] > 1 else 1
        return whole, whole[..., ::rows, ::stride]


class AltUpBertForMaskedLM(AltUpBertPreTrainedModel):
    """The encoder and the head that names the token at every place."""

    _tied_weights_keys = {"head.decoder.weight": "bert.embeddings.words.weight"}  # noqa: RUF012

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__(config)
        self.bert = AltUpBertModel(config)
        self.head = BertHead(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.bert.embeddings.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.bert.embeddings.words = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        return_logits: bool = True,
        masked_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> AltUpMaskedLMOutput | tuple:
        """`labels` [batch, tokens] holds the token that stood at a place, −100 where none is asked for. The loss
        is the mean over those asked for, or their sum divided by `num_items_in_batch`.

        `masked_positions` [batch, m] may list the places of all labels that count: with `return_logits=False` the
        head then runs at those places alone, a seventh of them in pretraining.
        """
        encoded = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
            output_attentions,
            return_dict=True,
        )
        hidden = encoded.last_hidden_state
        logits = sums = None
        if labels is not None and not return_logits:
            if masked_positions is not None:
                hidden = hidden.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
                labels = labels.gather(1, masked_positions)
            sums = self.head.sums(hidden, labels, self.config.z_loss)
        else:
            logits = self.head(hidden)
            if labels is not None:
                sums = token_sums(logits, labels, self.config.z_loss)
        if sums is not None:
            sums = self.with_balance_loss(sums)
        output = AltUpMaskedLMOutput(
            logits=logits if return_logits else None,
            hidden_states=encoded.hidden_states,
            **loss_fields(sums, num_items_in_batch),
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()


__all__ = ["AltUpBertForMaskedLM", "AltUpBertModel", "AltUpMaskedLMOutput"]
