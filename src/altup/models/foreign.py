"""Language models of transformers, unchanged or widened by `altup.widen`: found, loaded and trained.

A model's kind is the family of altup that learns as it does: `t5` (an encoder and a decoder), `bert` (masked) or
`decoder` (causal).
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.models.auto import modeling_auto

from altup.core.errors import UserError
from altup.core.pretrained import load_model
from altup.kernels.cross_entropy import IGNORED, TokenSums, token_sums
from altup.models.base import loss_fields
from altup.models.families import family, family_name, learner
from altup.models.masks import segment_positions
from altup.models.widening import load_widened
from altup.models.widening.parameters import WideningPlan
from altup.models.widening.widen import apply
from altup.transformers_hooks import is_widened

# Models whose positions are counted from behind the padding's, so that some of the table's rows are never read.
COUNT_BEHIND_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "mpnet", "longformer"),
    *("data2vec-text", "esm", "ibert", "luke", "markuplm", "xmod"),
}
# Classes of transformers by the objective that their heads are for.
CLASSES = {
    "span-corruption": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


def kind_of(config: PreTrainedConfig, place: str | Path) -> str:
    """The kind of the model that `config` belongs to; UserError for one that is no language model."""
    name = (config.architectures or ["model without a class"])[0]
    own = family_name(config.model_type)
    if own and not name.endswith("ForSequenceClassification"):
        return own
    for objective, classes in CLASSES.items():
        if name in classes.values():
            if objective == "causal" and _sees_ahead(config):
                raise UserError(
                    f"{str(place)!r} holds a {name} whose tokens see those behind them (is_decoder is not set): "
                    "it cannot learn to continue a text; give a causal model, or one with a masked head"
                )
            return learner(objective)
    raise UserError(
        f"{str(place)!r} holds a {name}, which is no causal, masked or sequence-to-sequence language model of "
        "transformers; give one that has such a head"
    )


def _sees_ahead(config: PreTrainedConfig) -> bool:
    """Whether a model with a causal head is an encoder whose config does not hide what comes later."""
    is_encoder = config.model_type in CLASSES["masked"] and not getattr(config, "is_decoder", False)
    return is_encoder or config.model_type == "xlnet"


def longest_text(config: PreTrainedConfig) -> int | None:
    """The most tokens that the model has positions for; None where there is no such number."""
    config = config.get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest and config.model_type in COUNT_BEHIND_PADDING:
        longest -= (config.pad_token_id or 0) + 1
    return longest


def check_positions(config: PreTrainedConfig, tokens: int, setting: str, name: str) -> None:
    """UserError where rows of `tokens` tokens, which `setting` asks for, are longer than the model's positions."""
    longest = longest_text(config)
    if longest and tokens > longest:
        raise UserError(
            f"{setting}={tokens} is more than the {longest} positions of {name}; give at most {longest}"
        )


def load_language_model(place: str | Path, config: PreTrainedConfig, **options: Any) -> Any:
    """The model at `place`, of our classes, of Transformers' or widened, with the fields of `config`.

    `options` are those of `from_pretrained`.
    """
    if is_widened(config):
        return load_widened(place, config=config, **options)
    found = family(kind_of(config, place))
    is_altup = config.model_type == found.config_class.model_type
    loader: Any = found.model_class if is_altup else found.auto_class
    return load_model(loader, place, config=config, **options)


class SumsModel:
    """Mixed into a model's own class, so that it answers as altup's models do, in sums over what counts. Names of
    weights and what is saved stay."""

    config: PreTrainedConfig
    z_loss: float
    records_graphs = False  # what others do in a step, such as asking the GPU for a number, need not fit a graph


class TokenSumsModel(SumsModel):
    """Of a language model: sums over the tokens that count.

    loss_sum = Σ −log p(label) + z_loss·(log Σ exp logits)², in float32. `masked_positions` is not needed: these
    heads answer everywhere.
    """

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        return_logits: bool = True,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> ModelOutput:
        """input_ids: [batch, tokens]. `labels` are those of a decoder or of masked tokens; `shift_labels[t]` is
        the token after `input_ids[t]`. `segments` [batch, tokens] number the texts of packed rows, which
        transformers' causal models tell apart by positions that begin anew."""
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if segments is not None:
            inputs |= {"position_ids": segment_positions(segments), "use_cache": False}
        if self.config.is_encoder_decoder and labels is not None:
            inputs |= {"decoder_input_ids": shift_right(labels, self.config), "use_cache": False}
        elif shift_labels is not None:
            labels = shift_labels
            inputs["use_cache"] = False
        logits = super().forward(**inputs).logits  # type: ignore[misc]
        fields = {} if labels is None else loss_fields(token_sums(logits, labels, self.z_loss))
        return ModelOutput(**({"logits": logits} if return_logits else {}), **fields)


class ExampleSumsModel(SumsModel):
    """Of an encoder with a head for whole texts: sums over examples, of the same loss where labels are whole
    numbers, and of (score − label)² where they are not. A score within 0.1 of its label counts as correct."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_logits: bool = True,
    ) -> ModelOutput:
        """input_ids, attention_mask: [batch, tokens]; labels: [batch, 1]."""
        logits = super().forward(input_ids=input_ids, attention_mask=attention_mask).logits  # type: ignore[misc]
        fields = {}
        if labels is not None and labels.is_floating_point():
            error = logits.float() - labels
            loss, number = error.square().sum(), torch.full((), len(labels), device=labels.device).float()
            fields = loss_fields(TokenSums(loss, loss.detach(), (error.abs() <= 0.1).sum().float(), number))
        elif labels is not None:
            fields = loss_fields(token_sums(logits, labels[:, 0], self.z_loss))
        return ModelOutput(**({"logits": logits} if return_logits else {}), **fields)


def shift_right(labels: Tensor, config: Any) -> Tensor:
    """What a decoder reads to answer with `labels` [batch, tokens]: its start token, then all but the last one."""
    start = getattr(config, "decoder_start_token_id", None)  # newer configs of T5 may not have the field at all
    inputs = labels.new_full(labels.shape, config.pad_token_id if start is None else start)
    inputs[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, config.pad_token_id or 0)
    return inputs


def without_sums(model: SumsModel) -> Any:
    """The same model, weights and all, as an object of the class it had, which also generates."""
    own = (c for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, SumsModel))
    base: Any = next(own)
    plain = base.__new__(base)
    plain.__dict__ = model.__dict__
    return plain


def without_weights(model: SumsModel) -> Any:
    """A fresh model of the same shape, widened where `model` is, of its own class."""
    config = copy.deepcopy(model.config)
    fresh = type(without_sums(model))._from_config(config)
    if is_widened(config):
        apply(fresh, WideningPlan(**config.altup))
    return fresh


@torch.no_grad()
def keeps_texts_apart(model: TokenSumsModel) -> bool:
    """Whether texts that are packed into a row are read as if each had a row of its own; tried on a short one.

    Other tokens in the first text must not move the second: the answers stay the same to the bit in a model that
    keeps texts apart, and by little where a convolution reads a token across the border.
    """
    model.eval()  # type: ignore[attr-defined]
    device = next(model.parameters()).device  # type: ignore[attr-defined]
    size = model.config.get_text_config().vocab_size
    row = torch.arange(1, 17, device=device)
    rows = torch.stack([row, torch.where(row <= 6, row + size // 2, row)]) % size
    segments = torch.tensor([1] * 6 + [2] * 7 + [0] * 3, device=device).expand(2, -1)
    try:
        packed, other = model(input_ids=rows, segments=segments).logits[:, 6:13].float()  # type: ignore[operator]
        alone = model(input_ids=rows[:1, 6:13]).logits[0].float()  # type: ignore[operator]
    except Exception:  # whatever a model says that takes no positions
        return False
    spread = float(alone.std())
    moved, differs = ((packed - one).abs().max() for one in (other, alone))
    return bool(moved <= 1e-5 * spread) and bool(differs <= 1e-3 * spread)


@functools.cache
def _with_sums(base: Any, mixin: type[SumsModel]) -> type[PreTrainedModel]:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (mixin, base), names)


def answer_in_sums(
    model: PreTrainedModel, z_loss: float, mixin: type[SumsModel] = TokenSumsModel
) -> PreTrainedModel:
    """`model`, changed in place to answer as the training loop needs it: see `SumsModel`."""
    model.__class__ = _with_sums(type(model), mixin)  # type: ignore[arg-type]
    model.z_loss = z_loss  # type: ignore[assignment]
    return model
