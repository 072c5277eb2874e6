"""A layer of someone else's model that updates K blocks while it computes on one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from altup.core.errors import UserError
from altup.models.mixing import change_class, original_class
from altup.models.widening.blocks import Blocks, UnfitError, block_of
from altup.nn.altup import AltUpUpdate


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

    def lower(self, blocks: Sequence[Tensor], spare: list[Tensor] | None) -> Blocks | Tensor:
        """The last layer hands on the mean of the blocks (recycled) or all of them side by side."""
        if not self.last:
            return Blocks(blocks, spare)
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
        place = self.place
        if not args:  # by its name, or by an older one, which its class still takes
            args = (kwargs.pop(place.argument if place.argument in kwargs else next(iter(kwargs))),)
        hidden, *others = args
        # What a model has computed from the state, a layer is given of its own block.
        others = [block_of(value, place.active) for value in others]
        for name, value in kwargs.items():
            if type(value) is Blocks:
                kwargs[name] = value.blocks[place.active]
        blocks = place.lift(hidden)
        spare: list[Tensor] | None = None
        if is_plain_call(self):
            spare = [] if place.first else hidden.spare
            outputs = self._compute(blocks, others, kwargs, spare)
        else:
            outputs = super().__call__(*blocks, *others, **kwargs)
        new = place.lower(outputs[: place.num_blocks], spare)
        return (new, *outputs[place.num_blocks :]) if place.returns_tuple else new

    def forward(self, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        K = self.place.num_blocks
        return self._compute(args[:K], args[K:], kwargs)

    def _compute(
        self,
        blocks: Sequence[Tensor],
        others: Sequence[Any],
        kwargs: dict[str, Any],
        spare: list[Tensor] | None = None,
    ) -> Sequence[Tensor]:
        outputs = super().forward(blocks[self.place.active], *others, **kwargs)
        update: Any = self._modules["altup"]
        computed, *more = outputs if isinstance(outputs, tuple) else (outputs,)
        new = update(blocks, computed) if spare is None else update.forward_again(blocks, computed, spare)
        return (*new, *more) if more else new

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _blank, (original_class(self, WidenedLayer),), self.__getstate__()


@functools.cache
def widened_class(base: Any) -> type[nn.Module]:
    """Named as `base`: accelerate finds the layers that it shards, or keeps on one device, by that name."""
    plain = base.__call__ in (_CALL, GradientCheckpointingLayer.__call__)
    return type(base.__name__, (WidenedLayer, base), {"__module__": base.__module__, "has_plain_call": plain})


_CALL = nn.Module.__call__


def is_plain_call(layer: WidenedLayer) -> bool:
    """Whether calling a layer and its update does no more than call `forward`: no gradients, hooks or compiler.

    Text that is generated waits for the host in every layer, and calls take longer than the rest of an update.
    """
    update: Any = layer._modules["altup"]
    return not (
        torch.is_grad_enabled()
        or layer.training
        or not layer.has_plain_call
        or torch.compiler.is_compiling()
        or layer._compiled_call_impl
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or update._forward_hooks
        or update._forward_pre_hooks
        or "forward" in layer.__dict__  # as accelerate replaces it
        or "forward" in update.__dict__
        or nn.Module.__call__ is not _CALL
        or torch._C._get_tracing_state()
        or _has_any_global_hook()
    )


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
