"""A rule for what stands between layers: it reads a layer's input from a state of K blocks, and writes what the
layer computed into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor, nn

from altup.core.errors import UserError
from altup.kernels.altup_update import State
from altup.kernels.fp8 import Low

Layer = Callable[..., Tensor | tuple[Tensor, Tensor]]
SameState = TypeVar("SameState", Tensor, tuple[Tensor, ...])


class Normed(NamedTuple):
    """A norm's result; or, where it was rounded to 8 bits as it was made, that and a tensor for its gradient."""

    value: Tensor
    fp8: Low | None = None


class Reading(NamedTuple):
    """What a rule gives a layer.

    The layer's input is x or, where the layer is to do the addition, x + update. `normed` is the input's first
    norm where it is known. `kept` is what the rule needs again to write.
    """

    x: Tensor
    update: Tensor | None = None
    normed: Normed | None = None
    kept: Any = None


class Sublayer(NamedTuple):
    """`run(norm(x), …)` is an update of x. `reader` is the module that alone reads the norm, if there is one: it
    may take the norm in 8 bits."""

    norm: nn.Module
    run: Callable[..., Tensor]
    reader: nn.Module | None = None


def residual_and_update(computed: Tensor | tuple[Tensor | None, Tensor]) -> tuple[Tensor | None, Tensor]:
    """A layer's output as (residual, update): the terms of its last addition, or None and its output."""
    if isinstance(computed, Tensor):
        return None, computed
    if len(computed) != 2 or (computed[0] is not None and computed[0].shape != computed[1].shape):
        raise UserError(
            f"a layer returned {len(computed)} tensors; it must return its output, or a tuple "
            "(residual, update) of one shape whose sum is its output"
        )
    return computed


class Rule(nn.Module):
    """How K blocks change from layer to layer. A rule has two halves, and a site for each layer (or sublayer):

    - `read(state, site)`: what the layer is given;
    - `write(state, site, residual, update)`: the new state, for a layer that computed residual + update.

    `advance` does both between two layers; a rule that can do it in fewer passes has its own.
    """

    num_blocks: int = 1

    def lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, embedding_width] → the first state, [K, batch, tokens, d]."""
        raise NotImplementedError

    def read(self, state: State, site: int) -> Reading:
        raise NotImplementedError

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        """`kept` is that of the reading."""
        raise NotImplementedError

    def advance(
        self, state: State, site: int, residual: Tensor, update: Tensor, kept: Any, entry: Sublayer
    ) -> tuple[State, Reading]:
        """`write`, then `read` for the next site, which begins with the norm of `entry`."""
        state = self.write(state, site, residual, update, kept)
        return state, self.read(state, site + 1)

    def lower(self, state: State) -> Tensor:
        """The last state → [batch, tokens, output_width]."""
        raise NotImplementedError

    def forward(self, state: State, layer: Layer, index: int, *args: Any, **kwargs: Any) -> State:
        """The new state after `layer`, the stack's `index`-th."""
        reading = self.read(state, index)
        computed = residual_and_update(layer(reading.x, *args, **kwargs))
        return self.write(state, index, *computed, reading.kept)

    if TYPE_CHECKING:  # torch has Any

        def __call__(self, state: SameState, layer: Layer, index: int, *args: Any, **kwargs: Any) -> SameState: ...


class OneBlock(Rule):
    """The rule of a dense model: x ← layer(x)."""

    def lift(self, embeddings: Tensor) -> Tensor:
        return embeddings.unsqueeze(0)

    def read(self, state: State, site: int) -> Reading:
        return Reading(state[0])

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        new = update if residual is None else residual + update
        return new.unsqueeze(0) if isinstance(state, Tensor) else (new,)

    def advance(
        self, state: State, site: int, residual: Tensor, update: Tensor, kept: Any, entry: Sublayer
    ) -> tuple[State, Reading]:
        """The addition is left to the next layer, whose first norm reads the sum. The state is whole again after
        the next `write`."""
        return state, Reading(residual, update)

    def lower(self, state: State) -> Tensor:
        return state[0]
