"""Rules for updating a representation with a list of ordinary layers: AltUp, Recycled-AltUp and Sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from altup.errors import UserError, check_choice, check_whole
from altup.kernels import altup_update
from altup.nn.coefficients import CoefficientModule, coefficient

Layer = Callable[..., Tensor]

LOWERINGS = ("concat", "sum", "mean")


def active_blocks(num_blocks: int, num_layers: int, selection: str | Sequence[int]) -> tuple[int, ...]:
    """The block that each layer works on."""
    if isinstance(selection, str):
        check_choice("selection", selection, ("alternating", "same"))
        return tuple(i % num_blocks if selection == "alternating" else 0 for i in range(num_layers))
    blocks: tuple[int, ...] = tuple(selection) if isinstance(selection, list | tuple) else ()
    whole = all(type(block) is int and 0 <= block < num_blocks for block in blocks)
    if len(blocks) != num_layers or not whole:
        raise UserError(
            f"selection={selection!r} must be 'alternating', 'same' or a list that holds one block from 0 to "
            f"{num_blocks - 1} for each of the {num_layers} layers"
        )
    return blocks


def split(embeddings: Tensor, num_blocks: int) -> Tensor:
    """[..., K·d] → [..., K, d]."""
    if embeddings.shape[-1] % num_blocks:
        raise UserError(
            f"embeddings are {embeddings.shape[-1]} wide, which num_blocks={num_blocks} does not divide; "
            "use a table K·d wide (Recycled-AltUp takes one d wide)"
        )
    return embeddings.unflatten(-1, (num_blocks, -1))


class AltUpUpdate(CoefficientModule):
    """One layer's prediction and correction of the K blocks: K² + K learned scalars.

    P = I and g = 1 at the start: the blocks begin by moving together, as the dense model would.
    """

    def __init__(self, num_blocks: int, active: int) -> None:
        super().__init__()
        self.active = active
        self.P = coefficient(num_blocks, num_blocks)
        self.g = coefficient(num_blocks)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.eye_(self.P)
        nn.init.ones_(self.g)

    def predict(self, state: Tensor) -> Tensor:
        """x̂ = P·x."""
        dtype = torch.promote_types(state.dtype, self.P.dtype)
        with torch.autocast(state.device.type, enabled=False):
            return torch.einsum("ij,j...->i...", self.P.to(dtype), state.to(dtype)).to(state.dtype)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """x_new = x̂ + g ⊗ (y − x̂ᵃ), where a is the active block."""
        g = self.g.view(-1, *[1] * computed.dim())
        return (predicted + g * (computed - predicted[self.active])).to(predicted.dtype)

    def forward(self, state: Tensor, computed: Tensor) -> Tensor:
        """Both in one pass."""
        return altup_update(state, computed, self.P, self.g, self.active)


class AltUp(nn.Module):
    """Alternating Updates (Algorithm 1): a state K times as wide as the layers that update it.

    The state is block-major, [K, batch, tokens, d]. Layer ℓ runs on one block only, and all K blocks are
    predicted from the old ones and corrected with what the layer computed:

        x̂ⁱ = Σⱼ Pᵢⱼ xʲ,    y = layer(xᵃ),    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ),

    with K² + K learned scalars a layer. A hand-written transformer becomes

        rule = AltUp(num_blocks=2, num_layers=len(layers))
        state = rule.lift(embedding(tokens))              # the table is K·d wide
        for i, layer in enumerate(layers):
            state = rule(state, layer, i)
        logits = head(norm(rule.lower(state)))            # norm and head are K·d wide

    With `recycled=True` the table, norm and head stay d wide: `lift` repeats the embedding K times and `lower`
    adds the blocks up (or averages them: `lowering="mean"`, for models without a scale-free final norm).
    With `num_blocks=1` there are no coefficients and the rule is `x ← layer(x)`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        selection: str | Sequence[int] = "alternating",
        *,
        recycled: bool = False,
        lowering: str | None = None,
    ) -> None:
        super().__init__()
        check_whole("num_blocks", num_blocks, 1)
        check_whole("num_layers", num_layers, 1)
        self.num_blocks = num_blocks
        self.recycled = recycled
        self.lowering = lowering or ("sum" if recycled else "concat")
        check_choice("lowering", self.lowering, LOWERINGS)
        self.active = active_blocks(num_blocks, num_layers, selection)
        self.updates = nn.ModuleList(
            [AltUpUpdate(num_blocks, active) for active in self.active] if num_blocks > 1 else []
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for update in self.updates:
            update.reset_parameters()  # type: ignore[operator]
        if self.recycled and self.has_twins:
            self.part_twins()

    @property
    def has_twins(self) -> bool:
        """Whether two blocks play the same part: if they start equal, training keeps them equal for ever."""
        return self.num_blocks - len(set(self.active)) > 1

    @torch.no_grad()
    def part_twins(self, noise: float = 0.1, generator: torch.Generator | None = None) -> None:
        """Add noise to P whose rows sum to zero: equal blocks give the same function, but may now part."""
        for update in self.updates:
            P: Tensor = update.P  # type: ignore[assignment]
            step = noise * torch.randn(P.shape, generator=generator, dtype=P.dtype).to(P.device)
            P.add_(step - step.mean(dim=1, keepdim=True))

    def lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, K·d] → [K, batch, tokens, d]; recycled: [batch, tokens, d], repeated K times."""
        if self.recycled:
            return embeddings.unsqueeze(0).expand(self.num_blocks, *embeddings.shape)
        return split(embeddings, self.num_blocks).movedim(-2, 0).contiguous()

    def predict(self, state: Tensor, index: int) -> Tensor:
        """The prediction of layer `index`."""
        return state if self.num_blocks == 1 else self.updates[index].predict(state)  # type: ignore[operator]

    def correct(self, predicted: Tensor, computed: Tensor, index: int) -> Tensor:
        """The correction of layer `index`, whose layer computed `computed` from its active block."""
        if self.num_blocks == 1:
            return computed.unsqueeze(0)
        return self.updates[index].correct(predicted, computed)  # type: ignore[operator]

    def forward(self, state: Tensor, layer: Layer, index: int, *args: Any, **kwargs: Any) -> Tensor:
        """Predict, compute and correct in one pass: the new state after `layer`, the stack's `index`-th."""
        computed = layer(state[self.active[index]], *args, **kwargs)
        return computed.unsqueeze(0) if self.num_blocks == 1 else self.updates[index](state, computed)

    def lower(self, state: Tensor) -> Tensor:
        """The stack's output: [batch, tokens, K·d], or d wide where blocks are added or averaged."""
        if self.lowering == "concat":
            return state.movedim(0, -2).flatten(-2)
        return state.sum(dim=0) if self.lowering == "sum" else state.mean(dim=0)

    def extra_repr(self) -> str:
        return f"num_blocks={self.num_blocks}, active={list(self.active)}, recycled={self.recycled}"


class Sum(nn.Module):
    """The baseline that adds K embeddings of width d and is dense from there on; used as AltUp is."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        check_whole("num_blocks", num_blocks, 1)
        self.num_blocks = num_blocks

    def lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, K·d] → [1, batch, tokens, d]."""
        return split(embeddings, self.num_blocks).sum(dim=-2).unsqueeze(0)

    def forward(self, state: Tensor, layer: Layer, index: int, *args: Any, **kwargs: Any) -> Tensor:
        return layer(state[0], *args, **kwargs).unsqueeze(0)

    def lower(self, state: Tensor) -> Tensor:
        return state[0]
