"""A pretrained model widened so that it starts as exactly the function it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, T5ForConditionalGeneration

from altup.errors import UserError, check_choice, check_whole
from altup.models.config import preset_fields
from altup.models.t5.config import AltUpT5Config
from altup.models.t5.convert import from_hugging_face
from altup.models.t5.model import AltUpT5ForConditionalGeneration
from altup.nn import AltUp

UPCYCLE_METHODS = ("recycled", "altup", "sameup", "dense")


def upcycle(
    model: PreTrainedModel | str | Path, method: str = "recycled", num_blocks: int = 2, seed: int = 0
) -> AltUpT5ForConditionalGeneration:
    """A `recycled`, `altup` or `sameup` model that computes what the pretrained `model` computes, up to rounding.

    `model` is a Hugging Face T5 1.1 or Flan-T5, a dense T5 of ours, or a folder or hub name of either.
    `dense` only converts. All K blocks start equal; where nothing would ever tell two of them apart, noise in P
    whose rows sum to zero (from `seed`) lets training part them without changing the function.
    """
    check_choice("method", method, UPCYCLE_METHODS)
    check_whole("num_blocks", num_blocks, 1)
    dense = _as_dense(model)
    if method == "dense" or num_blocks == 1:
        return dense

    fields: dict[str, Any] = dense.config.to_dict() | preset_fields(method, num_blocks)
    if fields["widening"] == "altup":
        fields["tie_word_embeddings"] = False
    first = next(dense.parameters())
    wide: Any = AltUpT5ForConditionalGeneration(AltUpT5Config(**fields))
    wide = wide.to(first.device, first.dtype)
    weights = dense.state_dict()
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if ".rule." not in name:
                parameter.copy_(_replicate(name, weights[name], parameter))
        generator = torch.Generator().manual_seed(seed)
        for rule in (m for m in wide.modules() if isinstance(m, AltUp)):
            rule.reset_parameters()
            if rule.has_twins:
                rule.part_twins(generator=generator)
    wide.generation_config = copy.deepcopy(dense.generation_config)
    return wide.eval()


def _replicate(name: str, narrow: Tensor, wide: nn.Parameter) -> Tensor:
    """The tensor that acts on K equal blocks as `narrow` acts on one.

    Tables and norms produce blocks and are repeated; matrices that read all blocks are repeated and divided by K.
    """
    copies = wide.shape[-1] // narrow.shape[-1]
    if copies == 1:
        return narrow
    reads_blocks = name == "lm_head.weight" or name.endswith(
        ("cross_attention.k.weight", "cross_attention.v.weight")
    )
    repeated = narrow.repeat(*[1] * (narrow.dim() - 1), copies)
    return repeated / copies if reads_blocks else repeated


def _as_dense(model: PreTrainedModel | str | Path) -> AltUpT5ForConditionalGeneration:
    if isinstance(model, str | Path):
        model = load_pretrained(str(model))
    if isinstance(model, T5ForConditionalGeneration):
        return from_hugging_face(model)
    if not isinstance(model, AltUpT5ForConditionalGeneration):
        raise UserError(
            f"{type(model).__name__} cannot be upcycled; give a T5ForConditionalGeneration (T5 1.1 or Flan-T5) or "
            "a dense AltUpT5ForConditionalGeneration"
        )
    if model.config.num_blocks != 1:
        raise UserError(
            f"the model is widened already (widening={model.config.widening!r}, "
            f"num_blocks={model.config.num_blocks}); give a dense one"
        )
    return copy.deepcopy(model).eval()


def load_pretrained(place: str) -> PreTrainedModel:
    """A Hugging Face T5 or a T5 of ours, from a folder or the hub."""
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{place!r} is neither a model folder nor a model on the hub that can be reached: {error}"
        ) from error
    classes: dict[str, Any] = {
        "t5": T5ForConditionalGeneration,
        AltUpT5Config.model_type: AltUpT5ForConditionalGeneration,
    }
    if config.model_type not in classes:
        raise UserError(f"{place!r} holds a {config.model_type!r} model; give one of {', '.join(classes)}")
    try:
        model, info = classes[config.model_type].from_pretrained(
            place, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise UserError(f"{place!r}: the weights cannot be read as safetensors: {error}") from error
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if lost:
        raise UserError(f"{place!r} is not whole: {len(lost)} weights are missing or misshapen, first {lost[0]}")
    return model
