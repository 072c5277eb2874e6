"""Fresh weights shard by shard: a model is built without memory for its weights, and each rank fills in its rows.

`defer_weights` puts every parameter on the meta device as soon as it is registered. What is then written to it
(`nn.init` draws and fills) is kept as a list of operations, each with the state of the random generator before it.
The numbers themselves are drawn and thrown away, one parameter at a time, so that all draws come in the usual
order. `Deferred.fill` repeats the operations of one parameter after the other and keeps this rank's rows. So the
weights are the same, bit for bit, as those of one process, and no process ever holds more than one parameter in
full; the price is that numbers are drawn once more.

It is for models whose initialisation is known, as our own: `nn.init.orthogonal_` does nothing at all on the meta
device, so that it goes unseen after another write.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from altup.training.tensor_files import put

KEPT = 1 << 16  # elements of a parameter that may keep the value that it is registered with
MAKE_BLANK = {"empty", "empty_like", "empty_strided", "new_empty"}
COPY = {"clone", "constant_pad_nd"}
WRITE_ALL = {"normal_", "uniform_", "fill_", "zero_", "copy_", "eye"}  # operations that read nothing of the tensor


class NotDeferredError(Exception):
    """A parameter's first value cannot be repeated by itself; the model must be built in full."""


@dataclass
class _Operation:
    """One write to a parameter, or to a view of it."""

    run: Callable[[Tensor], Any]
    view: tuple[torch.Size, tuple[int, ...], int]  # size, stride and offset
    random: Tensor | None  # the generator's state before it

    def repeat(self, whole: Tensor) -> None:
        if self.random is not None:
            torch.set_rng_state(self.random)
        self.run(whole.as_strided(*self.view))


@dataclass
class _Written:
    """A parameter on the meta device and how its value comes about."""

    parameter: nn.Parameter
    start: Tensor | None
    operations: list[_Operation] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.start is not None or bool(self.operations)

    def value(self) -> Tensor:
        whole = torch.empty(self.parameter.shape, dtype=self.parameter.dtype)
        if self.start is not None:
            whole.copy_(self.start)
        for operation in self.operations:
            operation.repeat(whole)
        return whole


class Deferred(TorchDispatchMode):
    """Watches a model being built; afterwards `fill` gives its weights, unless they are not `wanted`."""

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self._wanted = wanted
        self._written: dict[int, _Written] = {}  # by the storage on the meta device
        self._room = torch.empty(0, dtype=torch.uint8)
        self._blank: set[int] = set()  # storages that hold no value yet
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # both kept, so that no id comes twice

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """For PyTorch to call whenever a module gets a parameter: the one that it gets instead."""
        if parameter is None:
            return None
        if parameter.is_meta:
            self._written.setdefault(_storage(parameter), _Written(parameter, None))
            return parameter
        if id(parameter) in self._replaced:  # registered twice: tied
            return self._replaced[id(parameter)][1]
        has_value = self._wanted and parameter.numel() <= KEPT and _storage(parameter) not in self._blank
        start = parameter.detach().clone() if has_value else None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        self._written[_storage(empty)] = _Written(empty, start)
        self._replaced[id(parameter)] = (parameter, empty)
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        return empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "empty" and math.prod(args[0]) > KEPT:
            # It becomes a parameter, as `register` sees.
            return torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
        target = self._target(func, args, kwargs) if self._wanted else None
        if target is not None:
            self._keep(func, target, args, kwargs)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            makes_blank = func.overloadpacket.__name__ in MAKE_BLANK
            if makes_blank or not func.is_view:
                (self._blank.add if makes_blank else self._blank.discard)(_storage(made))
            if func.overloadpacket.__name__ in COPY and made.is_meta:
                self._copied(args[0], made)
        return made

    def _copied(self, source: Tensor, copy: Tensor) -> None:
        """A copy of a parameter may become its value, as where Hugging Face pads the bias of a tied head."""
        known = self._written.get(_storage(source))
        if known and source.shape == copy.shape == known.parameter.shape:
            self._written[_storage(copy)] = _Written(nn.Parameter(copy), known.start, list(known.operations))

    def _target(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """The parameter, or the view of one, that an operation writes to."""
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, Tensor) and value.is_meta:
                if _storage(value) not in self._written:
                    raise NotDeferredError(str(func))
                return value
        return None

    def _keep(self, func: Any, target: Tensor, args: Any, kwargs: dict[str, Any]) -> None:
        others = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not target
        ]
        if any(other.is_meta for other in others) or kwargs.get("generator") is not None:
            raise NotDeferredError(str(func))
        place = [index for index, value in enumerate(args) if value is target]
        copied = [value.clone() if isinstance(value, Tensor) and not value.is_meta else value for value in args]

        def run(tensor: Tensor) -> Any:
            mine = [tensor if index in place else value for index, value in enumerate(copied)]
            return func(*mine, **{name: tensor if value is target else value for name, value in kwargs.items()})

        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            run(self._room_for(target))
        written = self._written[_storage(target)]
        if func.overloadpacket.__name__ in WRITE_ALL and target.shape == written.parameter.shape:
            written.operations.clear()
            written.start = None
        elif not written.known:
            raise NotDeferredError(f"{func} on what a constructor made")
        view = (target.size(), target.stride(), int(target.storage_offset()))
        written.operations.append(_Operation(run, view, state))

    def _room_for(self, target: Tensor) -> Tensor:
        """A tensor of the same layout, in memory that is used again and again: freed memory would be cut up by the
        states that are kept, and grow to the size of the model."""
        last = sum((n - 1) * s for n, s in zip(target.size(), target.stride(), strict=True))
        needed = target.element_size() * (1 + last)
        if needed > self._room.numel():
            self._room = torch.empty(needed, dtype=torch.uint8)
        return self._room[:needed].view(target.dtype).as_strided(target.size(), target.stride())

    def take_names(self, model: nn.Module) -> None:
        """Remember by their names the parameters that the finished model has."""
        self._named = {name: self._written.get(_storage(p)) for name, p in model.named_parameters()}
        self._replaced.clear()
        if any(buffer.is_meta for buffer in model.buffers()):
            raise NotDeferredError("a buffer")
        for name, written in self._named.items():
            if self._wanted and (written is None or not written.known):
                raise NotDeferredError(name)

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Give each parameter of `model`, which may be sharded, its first value."""
        before = torch.get_rng_state()
        for name, parameter in model.named_parameters():
            written = self._named[name]
            assert written is not None
            put(parameter, written.value())
        torch.set_rng_state(before)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _registering(deferred: Deferred) -> Iterator[None]:
    handle = register_module_parameter_registration_hook(deferred.register)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def defer_weights(build: Callable[[], nn.Module], wanted: bool = True) -> tuple[nn.Module, Deferred]:
    """`build()` with its parameters on the meta device, and what fills them once they are sharded.

    NotDeferredError where some initialisation is of a kind that cannot be repeated by itself. Buffers are real.
    Nothing is drawn where weights are not `wanted`, because others follow.
    """
    deferred = Deferred(wanted)
    try:
        with _registering(deferred), deferred:
            model = build()
    except RuntimeError as error:
        if "meta" in str(error):  # a value was read that is not there
            raise NotDeferredError(str(error)) from error
        raise
    deferred.take_names(model)
    return model, deferred
