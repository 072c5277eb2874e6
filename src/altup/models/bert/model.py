"""BERT: embeddings, layers and head, and the Hugging Face models around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from altup.core.errors import UserError
from altup.kernels.dropout import block_dropout
from altup.models.base import AltUpPreTrainedModel, SumsOutput, as_dict, refuse_attentions
from altup.models.bert.config import AltUpBertConfig
from altup.models.layers import PostNormLayer, build_experts
from altup.models.masks import key_mask
from altup.models.stack import LayerInputs, LayerStack, build_rule
from altup.nn import AltUp
from altup.nn.altup import split
from altup.nn.attention import GroupedAttention
from altup.nn.layers import LayerNorm, embed
from altup.nn.linear import Fp8Maps, apply_linears
from altup.nn.rule import Sublayer
from altup.nn.sequence import refuse_left_padding

__all__ = ["AltUpBertForMaskedLM", "AltUpBertModel", "AltUpMaskedLMOutput"]


class BertEmbeddings(nn.Module):
    """norm(word + position + token type), [batch, tokens, output_width].

    For Sum the K words of a token are added up first: K tables of width d, and dense from there on.
    """

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__()
        width = config.output_width
        self.summed = config.num_blocks if config.widening == "sum" else 1
        self.shared_blocks = config.shared_blocks
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
        """All [batch, tokens], but for `inputs_embeds` [batch, tokens, embedding_width] in the place of words."""
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        words: Any = embed(self.words, input_ids) if input_ids is not None else inputs_embeds
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
        return block_dropout(self.norm(embeddings), self.shared_blocks, self.dropout, self.training)


class BertFeedForward(Fp8Maps):
    """wo(gelu(wi·x)) with biases and the exact GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, hidden)
        self.wo = nn.Linear(hidden, width)

    def hidden_maps(self) -> tuple[list[nn.Linear], nn.Linear]:
        """Those into the hidden layer, and the one out of it."""
        return [self.wi], self.wo

    def forward(self, x: Tensor) -> Tensor:
        fp8 = self.in_fp8("feed_forward")
        (hidden,) = apply_linears(x, (self.wi,), fp8)
        return apply_linears(F.gelu(hidden), (self.wo,), fp8)[0]


class BertLayer(PostNormLayer):
    """Attention and feed-forward (and experts beside it), with a norm behind each addition."""

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

    def sublayers(self) -> list[Sublayer]:
        feed_forward = Sublayer(self.feed_forward_norm, self._feed_forward)
        return [Sublayer(self.attention_norm, self.attention), feed_forward]

    def forward(self, x: Tensor, mask: Tensor | None = None, **known: Any) -> tuple[None, Tensor]:
        """x: [batch, tokens, d]; `known` as of `run_sublayers`."""
        return self.run_sublayers(x, mask, **known)

    def _feed_forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        update = self.feed_forward(x)
        return update if self.experts is None else update + self.experts(x)


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
        return self.decoder(self.before_decoder(x))

    def before_decoder(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.transform(x)))


@dataclass
class AltUpMaskedLMOutput(SumsOutput, MaskedLMOutput):
    """Hugging Face's output and, when labels are given, sums over the tokens that count."""


class AltUpBertPreTrainedModel(AltUpPreTrainedModel):
    config_class = AltUpBertConfig
    config: AltUpBertConfig
    base_model_prefix = "bert"
    # The decoder reads K blocks too; sharing out the norm before it instead leaves it tied to the input table.
    reads_blocks: tuple[str, ...] = ("head.transform.weight", "head.norm.weight", "head.norm.bias")
    _no_split_modules = ["BertLayer"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings.words  # type: ignore[union-attr, return-value]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.embeddings.words = value  # type: ignore[union-attr]


class AltUpBertModel(LayerStack, AltUpBertPreTrainedModel):
    """The encoder alone: `input_ids` [batch, tokens] → [batch, tokens, output_width].

    Args:
        config: Shape and method; `AltUpBertConfig.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpBertConfig, AltUpBertModel
        >>> encoder = AltUpBertModel(AltUpBertConfig.from_preset("tiny", "recycled", k=2, vocab_size=100))
        >>> encoder(torch.randint(3, 100, (2, 12))).last_hidden_state.shape
        torch.Size([2, 12, 128])
    """

    _keys_to_ignore_on_load_unexpected = [r"^head\."]  # noqa: RUF012

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        # Sum has added its embeddings up before their norm and is dense here. Recycled-AltUp averages its
        # blocks: no norm follows that would undo a sum's scale.
        num_layers = config.num_layers
        self.by_sublayer = config.by_sublayer
        self.rule = (
            AltUp(1, num_layers) if config.widening == "sum" else build_rule(config, num_layers, lowering="mean")
        )
        self.layers = nn.ModuleList([BertLayer(config, index) for index in range(num_layers)])
        self.stride_layers(config)
        self.post_init()

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
        """All are [batch, tokens], but for `inputs_embeds` [batch, tokens, embedding_width] in the place of
        `input_ids`. `attention_mask` is 1 for real tokens, or [batch, 1, queries, keys]; rows of different lengths
        are padded on either side, for strided layers on the right."""
        refuse_attentions(output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        state = self.lift(self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds))
        whole = key_mask(attention_mask, state[0].shape[1], state[0].dtype)
        if self.strided and attention_mask is not None and attention_mask.dim() == 2:
            refuse_left_padding(attention_mask)

        def view(stride: int) -> LayerInputs:
            """The mask of every `stride`-th token; rows of queries are left out only where there are any."""
            if whole is None or stride == 1:
                return LayerInputs((whole,), {})
            return LayerInputs((whole[..., :: stride if whole.shape[-2] > 1 else 1, ::stride],), {})

        output, hidden = self.run_layers(state, self.inputs_by_stride(view), output_hidden_states)
        result = BaseModelOutput(output, hidden)  # type: ignore[arg-type]
        return result if as_dict(return_dict, self.config) else result.to_tuple()


class AltUpBertForMaskedLM(AltUpBertPreTrainedModel):
    """The encoder and the head that names the token at every place: `input_ids` and `labels` [batch, tokens] make
    a loss, and logits [batch, tokens, vocab_size].

    Args:
        config: Shape and method; `AltUpBertConfig.from_preset` makes one.

    Examples:
        >>> import torch
        >>> from altup import AltUpBertConfig, AltUpBertForMaskedLM
        >>> model = AltUpBertForMaskedLM(AltUpBertConfig.from_preset("tiny", "altup", k=2, vocab_size=100))
        >>> ids = torch.randint(3, 100, (2, 12))
        >>> model(input_ids=ids, labels=ids).logits.shape
        torch.Size([2, 12, 100])
    """

    _tied_weights_keys = {"head.decoder.weight": "bert.embeddings.words.weight"}  # noqa: RUF012

    def __init__(self, config: AltUpBertConfig) -> None:
        super().__init__(config)
        self.bert = AltUpBertModel(config)
        self.head = BertHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.head.decoder = new_embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def head_input(self, hidden: Tensor) -> tuple[Tensor, nn.Module]:
        return self.head.before_decoder(hidden), self.head.decoder

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
        """`labels` [batch, tokens] holds the original token of a place, −100 where none is predicted. The loss
        is the mean over the predicted ones, or their sum divided by `num_items_in_batch`.

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
        if masked_positions is not None and labels is not None and not return_logits:
            hidden = hidden.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            labels = labels.gather(1, masked_positions)
        output = AltUpMaskedLMOutput(
            hidden_states=encoded.hidden_states, **self.answer(hidden, labels, return_logits, num_items_in_batch)
        )
        return output if as_dict(return_dict, self.config) else output.to_tuple()
