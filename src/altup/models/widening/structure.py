"""The parts of a model that `widen` needs: its lists of layers, what feeds them and what reads them.

They are found by running the model; a handler tells what its structure does not say.
"""

from __future__ import annotations

import math
import re
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
from altup.models.widening.probe import make_example, run

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


def structure_of(
    model: PreTrainedModel, example: dict[str, Any] | None = None, stacks: list[str] | None = None
) -> Structure:
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
    if stacks is not None:
        if isinstance(stacks, str) or not stacks:
            raise UserError(f"stacks={stacks!r} is no list of names; give ['model.layers'], say")
        structure.stacks = list(stacks)
    if structure.example is None:
        structure.example = make_example(model)
    return structure


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


def find_stacks(model: PreTrainedModel, structure: Structure) -> tuple[list[Stack], list[str], dict[str, Tensor]]:
    """The stacks, the names of the modules in the order in which they were called, and the model's outputs."""
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
            model, f"it does not run with the example {_shapes(structure.example)}: {told(error)}"
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
    if not output:
        raise unrecognised(model, "it returns no numbers to compare")
    found = [stack for name, m in lists.items() if (stack := _as_stack(name, len(m), calls))]
    if structure.stacks is None:
        # What has no parts is a projection and no layer, and one module in a list is seldom a stack beside others.
        found = [stack for stack in found if all(_has_parts(layer) for layer in lists[stack.name])]
        found = [stack for stack in found if len(lists[stack.name]) > 1] or found
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
    changed = 0  # handed on, but not untouched: images may be added between layers
    seen: list[Tensor] = []
    for ((received, returned),) in layers:
        if received is not hidden:
            if not isinstance(received, Tensor) or any(received is other for other in seen):
                return None
            changed += 1
        if not isinstance(received, Tensor) or received.shape != shape:
            return None
        seen.append(received)
        hidden = returned[0] if isinstance(returned, tuple) else returned
        if not isinstance(hidden, Tensor) or hidden.shape != shape:
            return None
    if changed and changed >= length - 1:
        return None
    return Stack(name, shape[-1], isinstance(layers[0][0].returned, tuple))


def parts_not_run(model: PreTrainedModel, stacks: list[Stack], called: list[str]) -> dict[str, bool]:
    """The largest parts outside the stacks that the example does not run.

    And whether each may make what joins the state: it has layers itself, or a map to the width of a stack.
    """
    widths = {stack.width for stack in stacks}
    run_or_around = {name[: match.start()] for name in set(called) for match in re.finditer(r"\.|$", name)}
    seen = {id(p) for name in run_or_around for p in model.get_submodule(name).parameters(recurse=False)}
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        if name in run_or_around or any(_inside(name, other) for other in [*found, *(s.name for s in stacks)]):
            continue
        if all(id(parameter) in seen for parameter in module.parameters()):
            continue
        parts = list(module.modules())
        maps = any(isinstance(part, Maps) and part.weight.shape[0] in widths for part in parts)
        inside_attention = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        # Attention reads the weights of its map without calling it.
        if _has_parts(module) or (maps and not inside_attention):
            found[name] = maps or any(isinstance(part, PreTrainedModel | nn.ModuleList) for part in parts)
    return found


class Entries(NamedTuple):
    """Parameters that make the states entering the stacks, with the dimension that is their width.

    - `tables`: in the smallest model around a stack that has any, all embedding tables of its width, all
      parameters that belong to no ordinary layer (class tokens, position embeddings), and the last map called
      before it.
    - `features`: the same of what stands farther out: the projection that makes images fit between the tokens.
    """

    tables: dict[str, int]
    features: dict[str, int]


def find_entries(model: PreTrainedModel, structure: Structure, stacks: list[Stack], order: list[str]) -> Entries:
    if structure.entries is not None:
        homes = {name: model.get_submodule(name.rpartition(".")[0]) for name in structure.entries}
        named = {n: 0 if isinstance(m, Maps) else model.get_parameter(n).dim() - 1 for n, m in homes.items()}
        return Entries(named, {})
    entries = Entries({}, {})
    taken = [stack.name for stack in stacks]
    farther: list[tuple[Stack, str]] = []
    for stack in stacks:
        around = [n for n, m in model.named_modules() if isinstance(m, PreTrainedModel) and _inside(stack.name, n)]
        for home in sorted(around, key=len, reverse=True):
            if stack.name not in taken:
                farther.append((stack, home))
            elif found := _entries(model, home, [other.name for other in stacks], stack, order):
                entries.tables.update(found)
                taken[taken.index(stack.name)] = home
    for stack, home in farther:
        entries.features.update(_entries(model, home, taken, stack, order))
    return entries


def _entries(
    model: PreTrainedModel, home: str, without: list[str], stack: Stack, order: list[str]
) -> dict[str, int]:
    modules = {
        name: module
        for name, module in model.named_modules()
        if _inside(name, home) and not any(_inside(name, other) for other in without)
    }
    entries = {}
    for name, module in modules.items():
        holds_tables = isinstance(module, nn.Embedding) or _has_parts(module)
        for own, parameter in module.named_parameters(recurse=False):
            if holds_tables and parameter.dim() and parameter.shape[-1] == stack.width:
                entries[f"{name}.{own}" if name else own] = parameter.dim() - 1
    before = order[: order.index(f"{stack.name}.0")]
    maps = [name for name in before if isinstance(modules.get(name), Maps) and _makes(modules[name], stack.width)]
    if maps:
        entries |= {f"{maps[-1]}.{own}": 0 for own, _ in modules[maps[-1]].named_parameters(recurse=False)}
    return entries


@contextmanager
def widening_readers(model: PreTrainedModel, plan: WideningPlan, widths: set[int]) -> Iterator[None]:
    """While the model runs, widen each norm and each matrix that receives a state wider than it was made for.

    Dropouts that receive it outside of the layers are noted in the plan.
    """

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

    def note_dropout(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            state = _first(args, kwargs)
            width = next((width for width in widths if _is_wide(state, width, plan, widths)), None)
            if width is not None:
                plan.dropouts[name] = width

        return hook

    handles = []
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if type(module) is nn.Dropout:
            if not plan.recycled and not any(_inside(name, stack) for stack in plan.stacks):
                handles.append(module.register_forward_pre_hook(note_dropout(name), with_kwargs=True))
        elif isinstance(module, nn.Linear | Conv1D):
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


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def told(error: Exception) -> str:
    """What an error says, or its kind where it says nothing."""
    return str(error) or type(error).__name__


def _makes(module: nn.Module, width: int) -> bool:
    return cast(Tensor, module.weight).shape[0] == width


def _shapes(example: dict[str, Any] | None) -> str:
    return str({k: list(v.shape) if isinstance(v, Tensor) else v for k, v in (example or {}).items()})
