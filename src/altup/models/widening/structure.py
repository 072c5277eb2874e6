"""The parts of a model that `widen` needs: its lists of layers, what feeds them and what reads them.

They are found by running the model; a handler tells what its structure does not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from altup.core.errors import UserError
from altup.models.widening.parameters import WideningPlan, widen_parameter

Maps = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

HELP = (
    "Looked for lists of layers (nn.ModuleList) that are called one after the other, each with the "
    "[batch, tokens, width] tensor that the one before it returned, and for the tables that make the first one. "
    "Give inputs that the model accepts as widen(model, example={{...}}), or describe the model: "
    "altup.register_handler({model_type!r}, lambda model: altup.Structure(stacks=['backbone.layers'], "
    "entries=['backbone.table.weight']))."
)


@dataclass
class Structure:
    """The parts of a model that `widen` needs; what is None is found by running the model.

    - `stacks`: names of the lists of layers, such as `model.layers`. Each layer takes the hidden state
      [batch, tokens, d] first and returns it, alone or first in a tuple.
    - `entries`: for `altup` and `sameup`, names of the parameters that make the state entering the first layers:
      embedding tables and the like, and convolutions or linear maps.
    - `example`: inputs to run the model with, as keyword arguments.

    Args:
        stacks: Names of the lists of layers.
        entries: Names of the parameters that make the state.
        example: Arguments of the model's forward.

    Examples:
        >>> import altup
        >>> altup.Structure(stacks=["backbone.blocks"]).entries is None
        True
    """

    stacks: list[str] | None = None
    entries: list[str] | None = None
    example: dict[str, Any] | None = None


Handler = Callable[[PreTrainedModel], Structure]

_HANDLERS: dict[str, Handler] = {}


def register_handler(model_type: str, handler: Handler) -> None:
    """Tell `widen` how models whose config has this `model_type` are built.

    Args:
        model_type: The `model_type` of the models' config.
        handler: A function that takes the model and returns its `Structure`.

    Examples:
        >>> import altup
        >>> altup.register_handler("my_model", lambda model: altup.Structure(stacks=["backbone.blocks"]))
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


class Stack(NamedTuple):
    """A list of layers: its name, the width of its hidden state and whether its layers return tuples."""

    name: str
    width: int
    returns_tuple: bool


class Call(NamedTuple):
    received: Any
    returned: Any


def unrecognised(model: PreTrainedModel, why: str, recycle: bool = False) -> UserError:
    advice = HELP.format(model_type=model.config.model_type)
    if recycle:
        advice = f"method='recycled' leaves tables and heads as they are and may do. {advice}"
    return UserError(f"{type(model).__name__} cannot be widened: {why}. {advice}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model for its shapes: no dropout, no gradients, and every module's mode as it was afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(model: PreTrainedModel, example: dict[str, Any]) -> Tensor:
    """The first tensor of the model's output."""
    inputs = {
        key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in example.items()
    }
    inputs = {
        key: value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    with evaluating(model):
        outputs = model(**inputs, return_dict=True)
    return next(value for value in outputs.values() if isinstance(value, Tensor))


def find_stacks(model: PreTrainedModel, structure: Structure) -> tuple[list[Stack], list[str], Tensor]:
    """The stacks, the names of the modules in the order in which they were called, and the model's output."""
    calls: dict[str, list[Call]] = {}
    order: list[str] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            order.append(name)
            calls.setdefault(name, []).append(Call(_first(args, kwargs), output))

        return hook

    handles = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        output = run(model, structure.example or {})
    except Exception as error:
        raise unrecognised(
            model, f"it does not run with the example {_shapes(structure.example)}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if structure.stacks is not None:
        unknown = set(structure.stacks) - lists.keys()
        if unknown:
            raise UserError(
                f"{type(model).__name__} has no list of layers named {sorted(unknown)[0]!r}; name one or more of "
                f"{', '.join(sorted(lists))}"
            )
        lists = {name: lists[name] for name in structure.stacks}
    found = [stack for name, m in lists.items() if (stack := _as_stack(name, len(m), calls))]
    outer = [s for s in found if not any(s.name.startswith(f"{other.name}.") for other in found)]
    if not outer or (structure.stacks is not None and len(outer) < len(lists)):
        raise unrecognised(model, f"found no stack of layers in {sorted(lists) or 'it'}")
    return outer, order, output


def _as_stack(name: str, length: int, calls: dict[str, list[Call]]) -> Stack | None:
    layers = [calls.get(f"{name}.{i}", []) for i in range(length)]
    if any(len(of_layer) != 1 for of_layer in layers):
        return None
    hidden = layers[0][0].received
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return None
    shape = hidden.shape
    for ((received, returned),) in layers:
        if received is not hidden:
            return None
        hidden = returned[0] if isinstance(returned, tuple) else returned
        if not isinstance(hidden, Tensor) or hidden.shape != shape:
            return None
    return Stack(name, shape[-1], isinstance(layers[0][0].returned, tuple))


def find_entries(
    model: PreTrainedModel, structure: Structure, stacks: list[Stack], order: list[str]
) -> dict[str, int]:
    """The parameters that make the states entering the stacks, with the dimension that is their width.

    These are, in the smallest model around a stack that has any: all embedding tables of its width, all parameters
    that belong to no ordinary layer (class tokens, position embeddings), and the last map called before it.
    """
    if structure.entries is not None:
        homes = {name: model.get_submodule(name.rpartition(".")[0]) for name in structure.entries}
        return {n: 0 if isinstance(m, Maps) else model.get_parameter(n).dim() - 1 for n, m in homes.items()}
    entries: dict[str, int] = {}
    for stack in stacks:
        around = [n for n, m in model.named_modules() if isinstance(m, PreTrainedModel) and _inside(stack.name, n)]
        for home in sorted(around, key=len, reverse=True):
            outside = {
                name: module
                for name, module in model.named_modules()
                if _inside(name, home) and not any(_inside(name, other.name) for other in stacks)
            }
            if found := _entries(outside, stack, order):
                entries |= found
                break
    return entries


def _entries(modules: dict[str, nn.Module], stack: Stack, order: list[str]) -> dict[str, int]:
    entries = {}
    for name, module in modules.items():
        holds_tables = isinstance(module, nn.Embedding) or next(module.children(), None) is not None
        for own, parameter in module.named_parameters(recurse=False):
            if holds_tables and parameter.shape[-1] == stack.width:
                entries[f"{name}.{own}" if name else own] = parameter.dim() - 1
    before = order[: order.index(f"{stack.name}.0")]
    maps = [name for name in before if isinstance(modules.get(name), Maps) and _makes(modules[name], stack.width)]
    if maps:
        entries |= {f"{maps[-1]}.{own}": 0 for own, _ in modules[maps[-1]].named_parameters(recurse=False)}
    return entries


@contextmanager
def widening_readers(model: PreTrainedModel, plan: WideningPlan, widths: set[int]) -> Iterator[None]:
    """While the model runs, widen each norm and each matrix that receives a state wider than it was made for."""

    def widen_norm(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            state = _first(args, kwargs)
            parameters = dict(module.named_parameters(recurse=False))
            if any(_is_wide(state, parameter.shape[0], plan, widths) for parameter in parameters.values()):
                for own in parameters:
                    widen_parameter(model, plan, f"{name}.{own}", 0)

        return hook

    def widen_matrix(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            dim = 0 if isinstance(module, Conv1D) else 1
            weight = cast(Tensor, module.weight)
            if weight.dim() == 2 and _is_wide(_first(args, kwargs), weight.shape[dim], plan, widths):
                widen_parameter(model, plan, f"{name}.weight", dim, shared=True)

        return hook

    handles = []
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear | Conv1D):
            handles.append(module.register_forward_pre_hook(widen_matrix(name), with_kwargs=True))
        elif parameters and all(parameter.dim() == 1 for parameter in parameters):
            handles.append(module.register_forward_pre_hook(widen_norm(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a module was given first, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _is_wide(state: Any, width: int, plan: WideningPlan, widths: set[int]) -> bool:
    return width in widths and isinstance(state, Tensor) and state.shape[-1] == plan.num_blocks * width


def _inside(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(f"{parent}.")


def _makes(module: nn.Module, width: int) -> bool:
    return cast(Tensor, module.weight).shape[0] == width


def _shapes(example: dict[str, Any] | None) -> str:
    return str({k: list(v.shape) if isinstance(v, Tensor) else v for k, v in (example or {}).items()})
