"""Dropout of a widened state: what is dropped of one block is dropped of all."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from altup.models.widening.parameters import WideningPlan


class BlockDropout(nn.Dropout):
    """`nn.Dropout` with one mask for all K blocks of a state [..., K·d].

    Layers take the same steps on all blocks while P = I and g = 1, so what tells blocks apart when they enter the
    first layer stays in the state up to the last. With a mask of its own for every block that is noise as large as
    what was dropped, which the pretrained layers have never seen. With one mask a widened model also trains as the
    original would, with the same draws.
    """

    num_blocks: int
    wide: int

    def forward(self, state: Tensor) -> Tensor:
        if not self.training or state.shape[-1] != self.wide:
            return super().forward(state)
        mask = super().forward(state.new_ones(*state.shape[:-1], self.wide // self.num_blocks))
        return state * torch.cat([mask] * self.num_blocks, dim=-1)


def share_masks(model: nn.Module, plan: WideningPlan) -> None:
    """Give the plan's dropouts one mask for all blocks."""
    for name, width in plan.dropouts.items():
        module = model.get_submodule(name)
        module.__class__ = BlockDropout
        module.num_blocks, module.wide = plan.num_blocks, plan.num_blocks * width  # type: ignore[assignment]


def separate_masks(model: nn.Module, plan: WideningPlan) -> None:
    """Undo `share_masks`."""
    for name in plan.dropouts:
        module = model.get_submodule(name)
        if isinstance(module, BlockDropout):
            module.__class__ = nn.Dropout  # type: ignore[assignment]
            del module.num_blocks, module.wide


@contextmanager
def functional_dropouts(model: nn.Module, plan: WideningPlan, widths: set[int]) -> Iterator[list[float]]:
    """While the model runs, note the probabilities of dropouts that are functions and not modules, and that the
    wide state goes through outside of the layers: they draw a mask for every block."""
    found: list[float] = []
    inside: list[nn.Module] = []  # of layers and modules, whose own dropouts are no matter here
    drop = nn.functional.dropout

    @functools.wraps(drop)
    def noting(state: Any, p: float = 0.5, *args: Any, **options: Any) -> Any:
        width = state.shape[-1] / plan.num_blocks if isinstance(state, Tensor) and state.dim() else None
        if p and width in widths and not inside:
            found.append(p)
        return drop(state, p, *args, **options)

    parts = [layer for stack in plan.stacks for layer in plan.wide_layers(model, stack).values()]
    parts += [module for module in model.modules() if isinstance(module, nn.Dropout)]
    handles = [part.register_forward_pre_hook(lambda module, args: inside.append(module)) for part in parts]
    handles += [part.register_forward_hook(lambda module, args, output: inside.remove(module)) for part in parts]
    nn.functional.dropout = noting  # type: ignore[assignment]
    try:
        yield found
    finally:
        nn.functional.dropout = drop
        for handle in handles:
            handle.remove()
