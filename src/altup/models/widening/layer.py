"""A layer of someone else's model that updates K blocks while it computes on one of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from altup.core.errors import UserError
from altup.models.mixing import change_class, original_class
from altup.models.widening.blocks import Blocks, UnfitError, block_of


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

    altup: nn.Module
    place: Place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = self.place
        if not args:  # by its name, or by an older one, which its class still takes
            args = (kwargs.pop(place.argument if place.argument in kwargs else next(iter(kwargs))),)
        hidden, *others = args
        # What a model has computed from the state, a layer is given of its own block.
        others = [block_of(value, place.active) for value in others]
        kwargs = {name: block_of(value, place.active) for name, value in kwargs.items()}
        outputs = super().__call__(*place.lift(hidden), *others, **kwargs)
        blocks, more = outputs[: place.num_blocks], outputs[place.num_blocks :]
        new: Any = place.lower(blocks) if place.last else Blocks(blocks)
        return (new, *more) if place.returns_tuple else new

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        K = self.place.num_blocks
        blocks, args = args[:K], args[K:]
        outputs = super().forward(blocks[self.place.active], *args, **kwargs)
        if not isinstance(outputs, tuple):
            return self.altup(blocks, outputs)
        computed, *others = outputs
        return (*self.altup(blocks, computed), *others)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _blank, (original_class(self, WidenedLayer),), self.__getstate__()


@functools.cache
def widened_class(base: Any) -> type[nn.Module]:
    """Named as `base`: accelerate finds the layers that it shards, or keeps on one device, by that name."""
    return type(base.__name__, (WidenedLayer, base), {"__module__": base.__module__})


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
