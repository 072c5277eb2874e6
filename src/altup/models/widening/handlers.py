"""What `widen` is told about a model where its structure does not say enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from altup.core.errors import UserError


@dataclass
class Structure:
    """The parts of a model that `widen` needs; what is None is found by running the model.

    - `stacks`: names of the lists of layers, such as `model.layers`. Each layer takes the hidden state
      [batch, tokens, d] first and returns it, alone or first in a tuple.
    - `entries`: for `altup` and `sameup`, names of the parameters that make the state entering the first layers:
      embedding tables and the like, and convolutions or linear maps.
    - `example`: inputs to run the model with, as keyword arguments.
    """

    stacks: list[str] | None = None
    entries: list[str] | None = None
    example: dict[str, Any] | None = None


Handler = Callable[[PreTrainedModel], Structure]

_HANDLERS: dict[str, Handler] = {}


def register_handler(model_type: str, handler: Handler) -> None:
    """Tell `widen` how models whose config has this `model_type` are built.

    altup.register_handler("my_model", lambda model: altup.Structure(stacks=["backbone.blocks"]))
    """
    _HANDLERS[model_type] = handler


def structure_of(model: PreTrainedModel, example: dict[str, Any] | None = None) -> Structure:
    handler = _HANDLERS.get(model.config.model_type)
    described = Structure() if handler is None else handler(model)
    if not isinstance(described, Structure):
        raise UserError(
            f"the handler registered for {model.config.model_type!r} returned a {type(described).__name__}; it "
            "must return an altup.Structure"
        )
    structure = replace(described)  # a handler may return the same one for every model
    if not isinstance(example, dict | None):
        raise UserError(f"example is a {type(example).__name__}; give a dict of arguments of the model's forward")
    if example is not None:
        structure.example = example
    if structure.example is None:
        structure.example = _example(model)
    return structure


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """A small batch of the kind that the model's first input calls for."""
    config = model.config
    if model.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        shape = (1, config.num_channels, *size)
        return {"pixel_values": torch.linspace(-1, 1, math.prod(shape)).reshape(shape).sin()}
    end = getattr(config, "eos_token_id", None)
    end = end if isinstance(end, int) else 2
    vocabulary = getattr(config.get_text_config(), "vocab_size", max(end, 6) + 1)
    ids = torch.tensor([[3, 4, 5, 6, end]]).clamp(max=vocabulary - 1)  # some classifiers look for the end token
    return (
        {"input_ids": ids, "decoder_input_ids": ids}
        if getattr(config, "is_encoder_decoder", False)
        else {"input_ids": ids}
    )


def _whisper(model: PreTrainedModel) -> Structure:
    if model.main_input_name == "input_ids":
        return Structure()
    config = model.config
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    example = {"input_features": torch.linspace(-1, 1, math.prod(shape)).reshape(shape).sin()}
    if hasattr(getattr(model, "model", model), "decoder"):
        example["decoder_input_ids"] = torch.tensor([[1, 2, 3]])
    return Structure(example=example)


register_handler("whisper", _whisper)


def _deberta(model: PreTrainedModel) -> Structure:
    """Its table of relative positions stands beside the stack, as wide as the state, and is no part of it."""
    base: Any = getattr(model, model.base_model_prefix, model)
    place = "" if base is model else f"{model.base_model_prefix}."
    if getattr(base.embeddings, "embed_proj", None) is not None:
        return Structure(entries=[f"{place}embeddings.embed_proj.weight"])
    tables = [name for name, parameter in base.embeddings.named_parameters() if parameter.dim() == 2]
    return Structure(entries=[f"{place}embeddings.{name}" for name in tables])


register_handler("deberta", _deberta)
register_handler("deberta-v2", _deberta)
