"""A layer of someone else's model that updates K blocks while it computes on one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.core.errors import UserError
from altup.kernels.altup_update import begin_chain
from altup.models.mixing import change_class, original_class
from altup.models.widening.blocks import Blocks, UnfitError, block_of
from altup.nn.altup import AltUpUpdate

if TYPE_CHECKING:
    from altup.kernels.altup_update.relaunch import Link


@dataclass(frozen=True)
class Place:
    """Where a layer stands in its stack: what reaches it, which block is its own, and what it hands on."""

    num_blocks: int
    active: int
    first: bool
    last: bool
    recycled: bool
    returns_tuple: bool
    argument: str

    def lift(self, hidden: Any) -> Sequence[Tensor]:
        """The first layer receives [batch, tokens, d] (recycled) or [batch, tokens, K·d], the others K blocks."""
        if isinstance(hidden, Blocks) == self.first:
            raise UnfitError(
                "it does not hand the widened state from each layer to the next, as a widened stack must"
            )
        if not self.first:
            return hidden.blocks
        return (hidden,) * self.num_blocks if self.recycled else hidden.chunk(self.num_blocks, dim=-1)

    def lower(self, blocks: Sequence[Tensor]) -> Tensor:
        """The last layer hands on the mean of the blocks (recycled) or all of them side by side."""
        if not self.recycled:
            return torch.cat(tuple(blocks), dim=-1)
        if blocks[0].dtype == torch.float16:  # whose largest number a sum may exceed
            return functools.reduce(torch.add, [block / self.num_blocks for block in blocks])
        return functools.reduce(torch.add, blocks) / self.num_blocks


class WidenedLayer(nn.Module):
    """Mixed into a layer's own class, so that its weights keep their names and its class keeps its meaning.

    Between the layers the hidden state is `Blocks`, K tensors [batch, tokens, d]. `__call__` spreads them into
    positional arguments, so that checkpointing, sharding and hooks see nothing but ordinary tensors, and block 0
    where they expect the hidden state.
    """

    altup: AltUpUpdate
    place: Place
    has_plain_call: bool  # whether the class that it is mixed into has no `__call__` of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        link = args[0].link if len(args) == 1 and type(args[0]) is Blocks else None
        if link is not None and is_bare(self) and not torch.is_grad_enabled():  # which may begin between layers
            return self._follow(args[0].blocks, link, kwargs)
        place = self.place
        if not args:  # by its name, or by an older one, which its class still takes
            args = (kwargs.pop(place.argument if place.argument in kwargs else next(iter(kwargs))),)
        hidden, *others = args
        # What a model has computed from the state, a layer is given of its own block.
        others = [block_of(value, place.active) for value in others]
        _take_own_block(kwargs, place.active)
        blocks = place.lift(hidden)
        if place.first and not torch.compiler.is_compiling() and is_bare(self) and is_plain(self):
            new, *more = self._begin(blocks, others, kwargs)
        else:
            outputs = super().__call__(*blocks, *others, **kwargs)
            new, more = Blocks(outputs[: place.num_blocks]), outputs[place.num_blocks :]
        if place.last:
            new = place.lower(new.blocks)
        return (new, *more) if place.returns_tuple else new

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        K = self.place.num_blocks
        blocks, args = args[:K], args[K:]
        outputs = super().forward(blocks[self.place.active], *args, **kwargs)
        if not isinstance(outputs, tuple):
            return self.altup(blocks, outputs)
        computed, *others = outputs
        return (*self.altup(blocks, computed), *others)

    def _begin(self, blocks: Sequence[Tensor], others: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """`forward`, which begins a chain of updates where it can (`begin_chain`)."""
        update = self.altup
        outputs = super().forward(blocks[update.active], *others, **kwargs)
        computed, *more = outputs if isinstance(outputs, tuple) else (outputs,)
        new = begin_chain(blocks, computed, update, update.active)
        return Blocks(update.forward(blocks, computed)) if new is None else Blocks(*new), *more

    def _follow(self, blocks: Sequence[Tensor], link: Link, kwargs: dict[str, Any]) -> Any:
        """A call of a layer further along such a chain; the host has little time for it."""
        place, active = self.place, self.place.active
        if Blocks in map(type, kwargs.values()):
            _take_own_block(kwargs, active)
        outputs = super().forward(blocks[active], **kwargs)
        computed = outputs[0] if isinstance(outputs, tuple) else outputs
        chain, addresses = link
        update: Any = self._modules["altup"]
        updated = chain.follow(addresses, computed, update, active)
        new: Any = Blocks(update.forward(blocks, computed)) if updated is None else Blocks(*updated)
        if place.last:
            new = place.lower(new.blocks)
        if not place.returns_tuple:
            return new
        return (new, *outputs[1:]) if isinstance(outputs, tuple) else (new,)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _blank, (original_class(self, WidenedLayer),), self.__getstate__()


@functools.cache
def widened_class(base: Any) -> type[nn.Module]:
    """Named as `base`: accelerate finds the layers that it shards, or keeps on one device, by that name."""
    plain = base.__call__ in (_CALL, GradientCheckpointingLayer.__call__)
    return type(base.__name__, (WidenedLayer, base), {"__module__": base.__module__, "has_plain_call": plain})


_CALL = nn.Module.__call__


def is_bare(layer: WidenedLayer) -> bool:
    """Whether nothing hangs on a layer and its update, so that calling them does no more than call `forward`."""
    update: Any = layer._modules["altup"]
    its, of_update = layer.__dict__, update.__dict__
    return not (
        not layer.has_plain_call
        or type(update) is not AltUpUpdate  # as PEFT wraps what it trains, and FSDP what it shards
        or its["_forward_hooks"]
        or its["_forward_pre_hooks"]
        or of_update["_forward_hooks"]
        or of_update["_forward_pre_hooks"]
        or its["training"]  # as in gradient checkpointing
        or "forward" in its  # as accelerate replaces it
        or "forward" in of_update
        or layer._compiled_call_impl
    )


def is_plain(layer: WidenedLayer) -> bool:
    """Whether nothing else takes part in the calls of this pass: no gradients, tracer or hook of all modules."""
    return not (
        torch.is_grad_enabled()
        or nn.Module.__call__ is not _CALL
        or torch._C._get_tracing_state()
        or _has_any_global_hook()
    )


def _take_own_block(kwargs: dict[str, Any], active: int) -> None:
    for name, value in kwargs.items():
        if isinstance(value, Blocks):
            kwargs[name] = value.blocks[active]


def _blank(base: type[nn.Module]) -> nn.Module:
    """What unpickling fills: classes made on the fly cannot be found by name."""
    cls = widened_class(base)  # type: ignore[arg-type]
    return cls.__new__(cls)


def first_argument(layer: nn.Module) -> str:
    """The name by which a layer may be given its hidden state."""
    return list(inspect.signature(type(layer).forward).parameters)[1]


def widen_layer(layer: nn.Module, update: nn.Module, place: Place) -> None:
    """Give `layer` its coefficients and its new class."""
    if hasattr(layer, "altup"):
        raise UserError(
            f"{type(layer).__name__} has a part named 'altup' already: the model is widened; narrow it first"
        )
    if "forward" in vars(layer) and "_old_forward" not in vars(layer):  # as accelerate replaces it
        raise UserError(
            f"the forward of {type(layer).__name__} was replaced; widen the model before it is patched or compiled"
        )
    # While a model is loaded, coefficients are made without data as the weights are, or most of them.
    made_empty = next(update.parameters()).is_meta
    layer.altup = update if made_empty else update.to(next(layer.parameters()).device)
    layer.place = cast(Any, place)
    change_class(layer, widened_class(type(layer)))  # type: ignore[arg-type]


def narrow_layer(layer: nn.Module) -> None:
    change_class(layer, original_class(layer, WidenedLayer))
    del layer.altup, layer.place
