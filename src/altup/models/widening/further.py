"""A widened model made wider again: K blocks become m·K, as m copies that training may part.

State (x_1 … x_K) becomes (x_1 … x_K, x_1 … x_K, …). With P' = diag(P, …, P) and g' = (g, …, g) each copy takes the
steps of the original, whichever copy of the active block a layer works on, so the function stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from altup.models.widening.dropout import share_masks
from altup.models.widening.parameters import WideningPlan, names_of, repeat, replace, share
from altup.nn.altup import TWIN_NOISE, AltUp


@torch.no_grad()
def grow(model: PreTrainedModel, old: WideningPlan, new: WideningPlan) -> Callable[[], None]:
    """Make a model that is wide by `old` wide by `new`, with m times the blocks; returns what undoes it."""
    times = new.num_blocks // old.num_blocks
    values: list[tuple[list[str], Tensor]] = []
    for parameters, widened in ((old.repeated, repeat), (old.shared, share)):
        done: set[int] = set()
        for name, dim in parameters.items():
            parameter = model.get_parameter(name)
            if id(parameter) not in done:  # under another name
                names = names_of(model, parameter)
                values.append((names, parameter.detach()))
                replace(model, names, widened(parameter.detach(), dim, times))
                done.add(id(model.get_parameter(name)))
    share_masks(model, new)
    layers = []
    for stack in old.stacks:
        generator = torch.Generator().manual_seed(new.seed)
        wide = old.wide_layers(model, stack)
        rule = new.rule(len(wide))
        for i, layer in enumerate(wide.values()):
            layers.append((layer, layer.altup, layer.place))
            layer.altup = _copies(layer.altup, rule, i, times, generator)
            layer.place = dataclasses.replace(layer.place, num_blocks=new.num_blocks, active=rule.active[i])

    def undo() -> None:
        share_masks(model, old)
        for names, value in reversed(values):
            replace(model, names, value)
        for layer, update, place in layers:
            layer.altup, layer.place = update, place

    return undo


def _copies(
    update: torch.nn.Module, rule: AltUp, index: int, times: int, generator: torch.Generator
) -> torch.nn.Module:
    """The coefficients of m copies. Noise that is zero over the copies of a block lets twins part."""
    P, g = update.get_parameter("P"), update.get_parameter("g")
    grown = rule.updates[index].to(P.device)
    coefficients = torch.block_diag(*[P] * times)
    if rule.has_twins:
        step = TWIN_NOISE * torch.randn(len(coefficients), times, len(P), generator=generator)
        coefficients += (step - step.mean(dim=1, keepdim=True)).flatten(1).to(P)
    for name, value in (("P", coefficients), ("g", g.repeat(times))):
        grown.get_parameter(name).copy_(value)
        grown.get_parameter(name).requires_grad = update.get_parameter(name).requires_grad
    return grown
