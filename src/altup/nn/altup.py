"""Rules for updating a representation with a list of ordinary layers: AltUp, Recycled-AltUp and Sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from altup.core.errors import UserError, check_choice, check_whole
from altup.kernels.altup_update import State, altup_update
from altup.kernels.altup_update.with_norm import altup_update_norm, takes_norm
from altup.nn.coefficients import CoefficientModule, coefficient
from altup.nn.layers import is_plain_norm
from altup.nn.linear import Fp8Maps, is_unhooked
from altup.nn.rule import Normed, OneBlock, Reading, Rule, Sublayer

TWIN_NOISE = 0.1  # of coefficients, which lets equal blocks part
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


def _alike(state: State, blocks: Tensor) -> State:
    """`blocks` [K, ...] in the kind of `state`: stacked or a tuple."""
    return blocks if isinstance(state, Tensor) else blocks.unbind(0)


def _stacked(state: State) -> Tensor:
    return state if isinstance(state, Tensor) else torch.stack(tuple(state))


class _SideBySide(torch.autograd.Function):
    """Blocks [..., d] → [..., K·d]. Compiled code then writes the gradient of each block as the update reads it,
    instead of one from which they are copied."""

    @staticmethod
    def forward(ctx: Any, *blocks: Tensor) -> Tensor:
        ctx.num_blocks = len(blocks)
        return torch.cat(blocks, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in grad.chunk(ctx.num_blocks, dim=-1))


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

    def predict(self, state: State) -> State:
        """x̂ = P·x."""
        x = _stacked(state)
        dtype = torch.promote_types(x.dtype, self.P.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _alike(state, torch.einsum("ij,j...->i...", self.P.to(dtype), x.to(dtype)).to(x.dtype))

    def correct(self, predicted: State, computed: Tensor) -> State:
        """x_new = x̂ + g ⊗ (y − x̂ᵃ), where a is the active block."""
        x = _stacked(predicted)
        g = self.g.view(-1, *[1] * computed.dim())
        return _alike(predicted, (x + g * (computed - predicted[self.active])).to(x.dtype))

    def forward(self, state: State, computed: Tensor, residual: Tensor | None = None) -> State:
        """Both in one pass, for y = residual + computed."""
        return altup_update(state, computed, self.P, self.g, self.active, residual)


class AltUp(OneBlock):
    """Alternating Updates (Algorithm 1): a state K times as wide as the layers that update it.

    The state is block-major, [K, batch, tokens, d], or a tuple of K blocks [batch, tokens, d]: either goes in
    everywhere and the same kind comes out. A tuple spares the backward pass one copy of the state a layer. Layer ℓ
    runs on one block only, and all K blocks are predicted from the old ones and corrected with what the layer
    computed:

        x̂ⁱ = Σⱼ Pᵢⱼ xʲ,    y = layer(xᵃ),    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ),

    with K² + K learned scalars a layer.

    With `recycled=True` the table, norm and head stay d wide: `lift` repeats the embedding K times and `lower`
    adds the blocks up (or averages them: `lowering="mean"`, for models without a scale-free final norm).
    With `num_blocks=1` there are no coefficients and the rule is `x ← layer(x)`.

    A layer that ends with `return x + update` may return the tuple `(x, update)` instead: the rule then does the
    addition itself, in float32 and without a pass of its own.

    Args:
        num_blocks: K, how many blocks of the layers' width d the state has.
        num_layers: How many layers will be run through the rule; each has coefficients of its own.
        selection: The block that each layer works on: `alternating`, `same`, or a list with one block a layer.
        recycled: Whether the table is d wide and its rows are repeated K times.
        lowering: `concat`, `sum` or `mean` of the blocks at the end. By default `sum` if recycled, else `concat`.

    Examples:
        A hand-written transformer; embedding, norm and head are K·d wide:

        >>> import torch
        >>> from altup import AltUp
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        >>> rule = AltUp(num_blocks=2, num_layers=4)
        >>> state = rule.lift(torch.randn(3, 5, 2 * 8))
        >>> for i, layer in enumerate(layers):
        ...     state = rule(state, layer, i)
        >>> state.shape, rule.lower(state).shape
        (torch.Size([2, 3, 5, 8]), torch.Size([3, 5, 16]))
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
        """Whether two blocks are interchangeable: if they start equal, training keeps them equal for ever."""
        return self.num_blocks - len(set(self.active)) > 1

    @torch.no_grad()
    def part_twins(self, noise: float = TWIN_NOISE, generator: torch.Generator | None = None) -> None:
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

    def predict(self, state: State, index: int) -> State:
        """The prediction of layer `index`."""
        return state if self.num_blocks == 1 else self.updates[index].predict(state)  # type: ignore[operator]

    def correct(self, predicted: State, computed: Tensor, index: int) -> State:
        """The correction of layer `index`, whose layer computed `computed` from its active block."""
        if self.num_blocks == 1:
            return computed.unsqueeze(0) if isinstance(predicted, Tensor) else (computed,)
        return self.updates[index].correct(predicted, computed)  # type: ignore[operator]

    def read(self, state: State, site: int) -> Reading:
        return Reading(state[self.active[site]])

    def write(self, state: State, site: int, residual: Tensor | None, update: Tensor, kept: Any = None) -> State:
        """Predict and correct in one pass."""
        if self.num_blocks == 1:
            return super().write(state, site, residual, update)
        return self.updates[site](state, update, residual)

    def advance(
        self, state: State, site: int, residual: Tensor, update: Tensor, kept: Any, entry: Sublayer
    ) -> tuple[State, Reading]:
        """The update and the norm of the block that comes next are one kernel, where it runs."""
        if self.num_blocks == 1:
            return super().advance(state, site, residual, update, kept, entry)
        own: Any = self.updates[site]
        norm, reader = entry.norm, entry.reader
        plain = type(own) is AltUpUpdate and is_unhooked(own)
        if not plain or not is_plain_norm(norm) or isinstance(state, Tensor) or not takes_norm(state):
            return Rule.advance(self, state, site, residual, update, kept, entry)
        fp8 = isinstance(reader, Fp8Maps) and is_unhooked(reader) and reader.takes_fp8(update)
        coefficients, following = (own.P, own.g, own.active), self.active[site + 1]
        new = altup_update_norm(state, update, residual, *coefficients, norm.weight, norm.eps, following, low=fp8)
        return new.state, Reading(new.residual, normed=Normed(new.normed, new.low))

    def lower(self, state: State) -> Tensor:
        """The stack's output: [batch, tokens, K·d], or d wide where blocks are added or averaged."""
        if self.lowering == "concat":
            if isinstance(state, Tensor):
                return state.movedim(0, -2).flatten(-2)
            if len(state) == 1:
                return state[0]
            trains = torch.is_grad_enabled() and any(block.requires_grad for block in state)
            # Without a gradient Dynamo takes the first block for the function's context.
            apart = trains and torch.compiler.is_compiling()
            return _SideBySide.apply(*state) if apart else torch.cat(tuple(state), dim=-1)
        if self.lowering == "sum" and len(state) == 2:
            return state[0] + state[1]  # one kernel for two: nothing is stacked
        x = _stacked(state)
        return x.sum(dim=0) if self.lowering == "sum" else x.mean(dim=0)

    def extra_repr(self) -> str:
        return f"num_blocks={self.num_blocks}, active={list(self.active)}, recycled={self.recycled}"


class Sum(OneBlock):
    """The baseline that adds K embeddings of width d and is dense from there on; used as AltUp is."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        check_whole("num_blocks", num_blocks, 1)
        self.num_blocks = num_blocks

    def lift(self, embeddings: Tensor) -> Tensor:
        """[batch, tokens, K·d] → [1, batch, tokens, d]."""
        return split(embeddings, self.num_blocks).sum(dim=-2).unsqueeze(0)
