"""Widened models from folders and from the hub, also with another head."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from altup.core.errors import UserError, check_whole
from altup.core.pretrained import WHERE, load_config, load_model
from altup.models.methods import MOST
from altup.models.widening.parameters import WideningPlan, shares
from altup.models.widening.widen import apply, widen


def load_widened(
    place: str | Path,
    model_class: type[PreTrainedModel] | None = None,
    *,
    config: PreTrainedConfig | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The widened model that `save_pretrained` wrote to a folder, or that was pushed to the hub.

    `options` are those of `from_pretrained` (`dtype`, `device_map`, …). The class is the one named in the config;
    give `model_class` where that is not a class of transformers, or for another head on the widened body (what is
    new starts at random, with a warning). `config` is for fields that differ from those saved (dropout, say).

    Args:
        place: A folder, or a name on the hub.
        model_class: The model's class, where transformers does not know it or another head is wanted.
        config: A config to use instead of the saved one.
        options: Those of `from_pretrained`.

    Examples:
        >>> import altup
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=20))
        >>> altup.widen(model, "altup").save_pretrained("wide-gpt2")
        >>> type(altup.load_widened("wide-gpt2")).__name__
        'GPT2LMHeadModel'
    """
    if model_class is not None and not issubclass(model_class, PreTrainedModel):
        raise UserError(f"model_class={model_class!r} is no model of transformers; an Auto class is not needed")
    if config is None:
        where = {name: options[name] for name in WHERE if name in options}
        config = load_config(place, model_class.config_class if model_class else None, **where)
    saved = getattr(config, "altup", None)
    if not isinstance(saved, dict):
        raise UserError(
            f"{str(place)!r} holds a {config.model_type!r} model that was not widened (or only a part of it, by "
            "itself, which its config does not tell); load it with from_pretrained and give it to altup.widen"
        )
    cls = model_class or named_class(config, place)
    try:
        plan = WideningPlan(**saved)
        check_whole("num_blocks", plan.num_blocks, 1, MOST["num_blocks"])
    except TypeError as error:
        raise UserError(f"{str(place)!r}: 'altup' in its config is not of this altup version: {error}") from None
    if config.architectures and cls.__name__ not in config.architectures:
        return _with_other_head(load_widened(place, **options), cls, config, plan)
    if plan.untied.keys() & (cls._tied_weights_keys or {}).keys():
        # As it was when widened: merging in PEFT sets it to False for an untied head, and unties biases with that.
        config.tie_word_embeddings = True

    def build(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        try:
            apply(self, plan)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise UserError(f"{str(place)!r}: 'altup' in its config does not fit the model: {error}") from error

    # Hugging Face loads into what a class builds: for the time of loading, one that builds the model wide.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    builder = type(cls.__name__, (cls,), {"__init__": build, **names})
    model: PreTrainedModel = load_model(builder, place, config=config, **options)
    model.__class__ = cls
    return model


def _with_other_head(
    saved: PreTrainedModel, cls: type[PreTrainedModel], config: PreTrainedConfig, plan: WideningPlan
) -> PreTrainedModel:
    """A `cls` that is wide as `saved` is and has its body; what only `cls` has starts at random."""
    if len(set((getattr(saved, "hf_device_map", None) or {}).values())) > 1:
        raise UserError(f"another head ({cls.__name__}) goes on a model on one device; leave device_map out")
    config = copy.deepcopy(config)
    del config.altup
    config.architectures = [cls.__name__]
    model: Any = cls._from_config(config)
    model.to(dtype=saved.dtype, device=saved.device).eval()
    lists = {name for name, _ in model.named_modules()}
    stacks = [name for stack in plan.stacks if (name := _renamed(stack, saved, model)) in lists]
    if not stacks:
        raise UserError(
            f"a {cls.__name__} has none of the layers that are wide in a {type(saved).__name__} "
            f"({', '.join(plan.stacks)}); give a class with the same body"
        )
    layers = {_renamed(stack, saved, model): range(*part) for stack, part in plan.layers.items()}
    layers = {stack: part for stack, part in layers.items() if stack in stacks}
    widen(
        model, plan.method, plan.num_blocks, plan.selection, stacks=stacks, layers=layers or None, seed=plan.seed
    )
    state = {_renamed(name, saved, model): value for name, value in saved.state_dict().items()}
    body = {f"{stack}." for stack in stacks}
    fresh = set(model.load_state_dict(state, strict=False).missing_keys)
    if lost := sorted(name for name in fresh if any(name.startswith(stack) for stack in body)):
        raise UserError(f"a {type(saved).__name__} has no {lost[0]} for a {cls.__name__}; widen one of its own")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in fresh}
    fresh -= {name for name in fresh if id(parameters.get(name)) in loaded}  # tied to what was loaded
    for name, table in WideningPlan.required(model).untied.items():
        if name in fresh and table not in fresh:  # a head that would have been tied to the table reads as it does
            fresh.remove(name)
            _read_as_table(model, name, table, plan.num_blocks)
    if fresh:
        warnings.warn(
            f"{', '.join(sorted(fresh))} of {cls.__name__} start at random: a {type(saved).__name__} has none",
            stacklevel=3,
        )
    return model


def _read_as_table(model: PreTrainedModel, name: str, table: str, num_blocks: int) -> None:
    head, rows = model.get_parameter(name), model.get_parameter(table)
    if head.shape == rows.shape:
        with torch.no_grad():
            blocks = zip(rows.chunk(num_blocks, dim=1), shares(num_blocks), strict=True)
            head.copy_(torch.cat([block * part for block, part in blocks], dim=1))


def _renamed(name: str, old: PreTrainedModel, new: PreTrainedModel) -> str:
    """The name in `new` of a part of `old`: a model without a head has no prefix for its body."""
    prefix = f"{new.base_model_prefix}."
    had, has = (bool(one.base_model_prefix) and hasattr(one, one.base_model_prefix) for one in (old, new))
    if had and not has:
        return name.removeprefix(prefix)
    return f"{prefix}{name}" if has and not had else name


def named_class(config: PreTrainedConfig, place: str | Path) -> type[PreTrainedModel]:
    """The class of transformers that a config names first."""
    name = (config.architectures or [""])[0]
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise UserError(
            f"{str(place)!r} holds a {name or 'nameless model'}, which transformers does not have; give its "
            "class: load_widened(folder, model_class=...)"
        )
    return cls
