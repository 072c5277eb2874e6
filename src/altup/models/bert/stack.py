"""BERT's embeddings, layers and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.core.errors import UserError
from altup.kernels.cross_entropy import TokenSums, head_sums, token_sums
from altup.kernels.dropout import dropout
from altup.models.bert.config import AltUpBertConfig
from altup.models.rules import build_experts
from altup.nn.altup import split
from altup.nn.attention import GroupedAttention
from altup.nn.layers import LayerNorm, is_bare

ALIGNED = 8  # numbers that fill 16 bytes in half precision


class BertEmbeddings(nn.Module):
    """norm(word + position + token type), [batch, tokens, output_width].

    For Sum the K words of a token are added up first: K tables of width d, and dense from there on.
    """

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__()
        width = config.output_width
        self.summed = config.num_blocks if config.widening == "sum" else 1
        self.dropout = config.dropout_rate
        self.words = nn.Embedding(config.vocab_size, config.embedding_width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.token_types = nn.Embedding(config.type_vocab_size, width)
        self.norm = LayerNorm(width, eps=config.layer_norm_epsilon)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        words = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        length, most = words.shape[1], self.positions.num_embeddings
        if position_ids is None:
            if length > most:
                raise UserError(
                    f"the input has {length} tokens, max_position_embeddings={most}; shorten the input, or train "
                    "with more positions"
                )
            position_ids = torch.arange(length, device=words.device).unsqueeze(0)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        if self.summed > 1:
            words = split(words, self.summed).sum(dim=-2)
        embeddings = words + self.token_types(token_type_ids) + self.positions(position_ids)
        return dropout(self.norm(embeddings), self.dropout, self.training)


class BertFeedForward(nn.Module):
    """wo(gelu(wi·x)) with biases and the exact GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, hidden)
        self.wo = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi(x)))


class BertLayer(GradientCheckpointingLayer):
    """x ← norm(x + attention(x)), then x ← norm(x + feed_forward(x)), with experts beside the feed-forward."""

    def __init__(self, config: AltUpBertConfig, index: int) -> None:
        super().__init__()
        width, eps = config.layer_width, config.layer_norm_epsilon
        self.dropout = config.dropout_rate
        self.attention = GroupedAttention(
            width, config.num_heads, config.d_kv, bias=True, dropout=config.attention_dropout, index=index
        )
        self.attention_norm = LayerNorm(width, eps=eps)
        self.feed_forward = BertFeedForward(width, config.d_ff)
        self.experts = build_experts(config)
        self.feed_forward_norm = LayerNorm(width, eps=eps)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, tokens, d]."""
        x = self.attention_norm(x + self._drop(self.attention(x, mask)))
        update = self.feed_forward(x)
        if self.experts is not None:
            update = update + self.experts(x)
        return self.feed_forward_norm(x + self._drop(update))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class BertHead(nn.Module):
    """logits = decoder(norm(gelu(transform(x)))), all of it as wide as the stack's output.

    The decoder is the input table where they are tied, as BERT's is: of AltUp both are K·d wide.
    """

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__()
        width = config.output_width
        self.transform = nn.Linear(width, width)
        self.norm = LayerNorm(width, eps=config.layer_norm_epsilon)
        self.decoder = nn.Linear(width, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self._transform(x))

    def sums(self, x: Tensor, labels: Tensor, z_loss: float) -> TokenSums:
        """What the loss needs of the logits, without holding them all.

        The bias is a column of the decoder that meets a 1, among enough zeros to keep rows aligned.
        """
        hidden = self._transform(x)
        if not is_bare(self.decoder, bias=True):
            return token_sums(self.decoder(hidden), labels, z_loss)
        one = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, ALIGNED - 1))
        column = F.pad(self.decoder.bias.unsqueeze(1), (0, ALIGNED - 1))
        weight = torch.cat([self.decoder.weight, column], dim=1)
        return head_sums(torch.cat([hidden, one], dim=-1), weight, labels, z_loss)

    def _transform(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.transform(x)))
