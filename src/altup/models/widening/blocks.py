"""The widened state between two layers: K tensors that a model may treat as the one it had."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from altup.core.errors import UserError


class UnfitError(UserError):
    """A model does between its layers what a widened state cannot follow."""


class Blocks:
    """K tensors [batch, tokens, d]. What a model does to its state between two layers is done to each of them.

    So f(x) on K equal blocks makes K equal blocks f(x): images added between layers, tokens dropped, a skip
    connection. What is asked of the state (`shape`, `dtype`, `item()`) is answered by block 0. It is no tensor,
    list or tuple: a model that takes tuples apart leaves it whole.
    """

    __slots__ = ("blocks",)

    def __init__(self, blocks: Iterable[Tensor]) -> None:
        self.blocks = list(blocks)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _each(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "blocks":
            raise AttributeError(name)
        own = getattr(self.blocks[0], name)
        if not callable(own):
            return own
        return lambda *args, **kwargs: _each(getattr(Tensor, name), (self, *args), kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        _each(Tensor.__setitem__, (self, key, value), {})

    def __bool__(self) -> bool:
        return any(bool(block) for block in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks[0])


def block_of(value: Any, i: int) -> Any:
    return value.blocks[i] if isinstance(value, Blocks) else value


def _operator(name: str) -> Any:
    return lambda self, *args: _each(getattr(Tensor, name), (self, *args), {})


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "radd", "rsub", "rmul", "rtruediv", "iadd", "isub"):
    setattr(Blocks, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("imul", "itruediv", "neg", "getitem", "lt", "le", "gt", "ge"):
    setattr(Blocks, f"__{_name}__", _operator(f"__{_name}__"))


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` with block i in the place of every `Blocks` among its arguments, for each i."""
    count = len(_find(args, kwargs).blocks)
    results = [func(*_pick(args, i), **_pick(kwargs, i)) for i in range(count)]
    if isinstance(results[0], Tensor):
        return Blocks(results)
    if isinstance(results[0], tuple | list) and all(isinstance(part, Tensor) for part in results[0]):
        return tuple(Blocks(parts) for parts in zip(*results, strict=True))
    return results[0]


def _find(*values: Any) -> Any:
    for value in values:
        if isinstance(value, Blocks):
            return value
        if isinstance(value, Tensor):
            continue
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
        if (found := _find(*inner)) is not None:
            return found
    return None


def _pick(value: Any, i: int) -> Any:
    """`value` with block i of every `Blocks` in it."""
    if isinstance(value, Blocks):
        return value.blocks[i]
    if type(value) in (tuple, list):
        return type(value)(_pick(part, i) for part in value)
    if type(value) is dict:
        return {key: _pick(part, i) for key, part in value.items()}
    return value


def watch_stack(model: nn.Module, stack: str) -> None:
    """Hook into the modules around a stack, so that nobody outside meets `Blocks`."""
    parts = stack.split(".")
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    for module in around:
        if show_first_block not in module._forward_hooks.values():
            module.register_forward_hook(show_first_block)
    home: Any = next(module for module in reversed(around) if isinstance(module, PreTrainedModel))
    depth = len(cast(nn.ModuleList, model.get_submodule(stack)))
    if getattr(home.config, "num_hidden_layers", None) == depth:
        home.register_forward_pre_hook(functools.partial(check_depth, depth))


def unwatch(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if hook is show_first_block or getattr(hook, "func", None) is check_depth:
                    del hooks[key]


HOLDERS = {Blocks, tuple, list, dict}  # kinds of outputs in which blocks may be found


def show_first_block(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: who asks a model for its hidden states is given those of block 0."""
    if isinstance(output, dict) and HOLDERS.isdisjoint(map(type, output.values())):
        return output  # soon: text that is generated waits for it
    if isinstance(output, Mapping):
        if output and isinstance(next(iter(output.values())), Blocks):
            raise _not_lowered(module)
        for name in [name for name, value in output.items() if _find(value) is not None]:
            output[name] = _pick(output[name], 0)  # type: ignore[index]
    elif isinstance(output, tuple | list | Blocks) and _find(output) is not None:
        if isinstance(output, Blocks) or isinstance(output[0], Blocks):
            raise _not_lowered(module)
        return _pick(output, 0)
    return output


def _not_lowered(module: nn.Module) -> UnfitError:
    return UnfitError(
        f"{type(module).__name__} hands on its state before the last of its layers, and a widened model must run "
        "them all"
    )


def check_depth(layers: int, module: Any, args: Any) -> None:
    """A forward pre-hook: a stack of which a part is run ends without its last layer, which lowers the state."""
    depth = module.config.num_hidden_layers
    if depth != layers:
        raise UserError(
            f"{type(module).__name__} is to run {depth} of its {layers} layers (num_hidden_layers={depth}, which "
            "generate(assistant_early_exit=...) sets); a widened model must run them all"
        )
