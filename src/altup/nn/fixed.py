"""AltUp with coefficients that are never learned, at nearly a dense model's cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from altup.kernels.altup_update import State
from altup.nn.altup import AltUp, split
from altup.nn.rule import Reading, Sublayer


class FixedAltUp(AltUp):
    """AltUp with P = I and g = 1 for ever, where `AltUp` only starts with them.

    Every block then takes the same step, x_newⁱ = xⁱ + (y − xᵃ), and what two blocks differ in is what their
    embeddings differ in. So the state holds one block that moves, and for the others their distance from it:

        (x⁰, D¹, …, Dᴷ⁻¹)    with    xⁱ = x⁰ + Dⁱ,    Dⁱ = eⁱ − e⁰

    Layer ℓ computes y from x⁰ + Dᵃ, and x⁰ becomes y − Dᵃ: two additions of width d, none where block 0 is active.
    K·d wide are only the two ends, `lift` and `lower`. There are no parameters. It is used as `AltUp` is, but not
    recycled: blocks that start equal would stay equal, which is the dense model.

    Args:
        num_blocks: K, how many blocks of the layers' width d the state stands for.
        num_layers: How many layers will be run through the rule.
        selection: The block that each layer works on: `alternating`, `same`, or a list with one block a layer.

    Examples:
        >>> import torch
        >>> from altup import FixedAltUp
        >>> rule = FixedAltUp(num_blocks=2, num_layers=1)
        >>> state = rule(rule.lift(torch.randn(3, 5, 16)), torch.nn.Linear(8, 8), 0)
        >>> rule.lower(state).shape
        torch.Size([3, 5, 16])
    """

    def __init__(self, num_blocks: int, num_layers: int, selection: str | Sequence[int] = "alternating") -> None:
        super().__init__(num_blocks, num_layers, selection)
        self.updates = nn.ModuleList()

    def lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, K·d] → [K, batch, tokens, d]: the first block, and how far the others are from it."""
        first, *others = split(embeddings, self.num_blocks).unbind(-2)
        return torch.stack([first, *(other - first for other in others)])

    def block(self, state: State, index: int) -> Tensor:
        """xⁱ: [batch, tokens, d]."""
        return state[0] if index == 0 else state[0] + state[index]

    def predict(self, state: State, index: int) -> State:
        """The state as it is: P = I."""
        return state

    def correct(self, predicted: State, computed: Tensor, index: int) -> State:
        """The state whose active block is `computed`: the others keep their distance."""
        active = self.active[index]
        first = computed - predicted[active] if active else computed
        if isinstance(predicted, Tensor):
            return torch.cat([first.unsqueeze(0), predicted[1:]])
        return (first, *predicted[1:])

    def read(self, state: State, site: int) -> Reading:
        return Reading(self.block(state, self.active[site]))

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        return self.correct(state, update if residual is None else residual + update, site)

    def advance(
        self, state: State, site: int, residual: Tensor, update: Tensor, kept: Any, entry: Sublayer
    ) -> tuple[State, Reading]:
        """The update is left to the next layer, and what leads from block to block is added before it."""
        state = self.correct(state, residual, site)
        return state, Reading(self.block(state, self.active[site + 1]), update)

    def lower(self, state: State) -> Tensor:
        """The blocks side by side: [batch, tokens, K·d]."""
        return super().lower(tuple(self.block(state, index) for index in range(self.num_blocks)))
