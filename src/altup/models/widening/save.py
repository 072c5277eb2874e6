"""A widened model from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from altup.core.errors import UserError
from altup.models.widening.plan import Plan
from altup.models.widening.widen import apply


def load_widened(
    place: str | Path, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """The widened model that `save_pretrained` wrote to a folder, or that was pushed to the hub.

    `options` are those of `from_pretrained` (`dtype`, `device_map`, …). The class is the one named in the config;
    give `model_class` where that is not a class of transformers.
    """
    if model_class is not None and not issubclass(model_class, PreTrainedModel):
        raise UserError(f"model_class={model_class!r} is no model of transformers; an Auto class is not needed")
    try:
        config = AutoConfig.from_pretrained(place) if model_class is None else _config_of(model_class, place)
    except (OSError, ValueError) as error:
        raise UserError(f"{str(place)!r} is no model folder that can be read: {error}") from error
    saved = getattr(config, "altup", None)
    if not isinstance(saved, dict):
        raise UserError(
            f"{str(place)!r} holds a {config.model_type!r} model that was not widened (or only a part of it, by "
            "itself, which its config does not tell); load it with from_pretrained and give it to altup.widen"
        )
    cls = model_class or _named_class(config, place)
    if config.architectures and cls.__name__ not in config.architectures:
        raise UserError(
            f"{str(place)!r} holds a {config.architectures[0]}, not a {cls.__name__}; for another head widen a "
            f"{cls.__name__} and let it load the state_dict of the one here with strict=False"
        )
    try:
        plan = Plan(**saved)
    except TypeError as error:
        raise UserError(f"{str(place)!r}: 'altup' in its config is not of this altup version: {error}") from None
    if plan.untied.keys() & (cls._tied_weights_keys or {}).keys():
        # As it was when widened: merging in PEFT sets it to False for an untied head, and unties biases with that.
        config.tie_word_embeddings = True

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        apply(self, plan)

    # Hugging Face loads into what a class builds: for the time of loading, one that builds the model wide.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    builder = type(cls.__name__, (cls,), {"__init__": build, **names})
    fixed = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}  # told below
    try:
        model, info = builder.from_pretrained(place, config=config, **{**options, **fixed})  # type: ignore[attr-defined]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(place)!r}: the weights cannot be read as safetensors: {error}") from error
    model.__class__ = cls
    lost = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if lost:
        raise UserError(
            f"{str(place)!r} is not whole: {len(lost)} weights are missing or misshapen, first {lost[0]}"
        )
    return model


def _config_of(model_class: type[PreTrainedModel], place: str | Path) -> PreTrainedConfig:
    return model_class.config_class.from_pretrained(place)  # type: ignore[union-attr]


def _named_class(config: PreTrainedConfig, place: str | Path) -> type[PreTrainedModel]:
    name = (config.architectures or [""])[0]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise UserError(
            f"{str(place)!r} holds a {name or 'nameless model'}, which transformers does not have; give its "
            "class: load_widened(folder, model_class=...)"
        )
    return cls
