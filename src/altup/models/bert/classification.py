"""BERT with a head that names one of several labels, or a number, for a whole text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from altup.kernels.dropout import dropout
from altup.models.base import as_dict
from altup.models.bert.config import AltUpBertConfig
from altup.models.bert.model import AltUpBertModel, AltUpBertPreTrainedModel


class AltUpBertForSequenceClassification(AltUpBertPreTrainedModel):
    """The encoder and a head for whole texts: `input_ids` [batch, tokens] → logits [batch, num_labels].

    logits = classifier(tanh(dense(the mean of the tokens that are no padding))). With `labels` [batch] there is a
    loss: the cross-entropy, or for `num_labels=1` the mean squared error.

    Args:
        config: Shape and method; `AltUpBertConfig.from_preset` makes one. `num_labels` is how many the head names.

    Examples:
        >>> import torch
        >>> from altup import AltUpBertConfig, AltUpBertForSequenceClassification
        >>> config = AltUpBertConfig.from_preset("tiny", "altup", k=2, vocab_size=100)
        >>> config.num_labels = 3
        >>> model = AltUpBertForSequenceClassification(config)
        >>> model(torch.randint(3, 100, (2, 12))).logits.shape
        torch.Size([2, 3])
    """

    reads_blocks: tuple[str, ...] = ("dense.weight",)
    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__(config)
        self.bert = AltUpBertModel(config)
        self.dense = nn.Linear(config.output_width, config.output_width)
        self.classifier = nn.Linear(config.output_width, int(config.num_labels or 1))
        self.post_init()

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
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple:
        """As `AltUpBertModel`'s, with `labels` [batch]: numbers of labels, or scores where there is one label."""
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
        real = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask.to(hidden.dtype)
        mean = torch.einsum("btd,bt->bd", hidden, real) / real.sum(dim=1, keepdim=True).clamp(min=1)
        rate = self.config.dropout_rate
        logits = self.classifier(dropout(torch.tanh(self.dense(mean)), rate, self.training))
        loss = None
        if labels is not None:
            one = self.config.num_labels == 1
            loss = F.mse_loss(logits[:, 0], labels.to(logits.dtype)) if one else F.cross_entropy(logits, labels)
        output = SequenceClassifierOutput(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            hidden_states=encoded.hidden_states,
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()
