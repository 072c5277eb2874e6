"""What was done to a model to widen it: saved in its config, so that it can be done again or undone."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from altup.core.errors import UserError, check_choice, check_whole
from altup.nn import AltUp

METHODS = {"recycled": "alternating", "altup": "alternating", "sameup": "same"}


@dataclass
class Plan:
    """The choices, and the names of what they touch.

    - `stacks`: each list of layers, and whether its layers return a tuple.
    - `repeated`: parameters that make the state or scale it, with the dimension that was repeated K times.
    - `shared`: matrices that read the wide state, with the dimension that was repeated; the copies' shares add up
      to one.
    - `untied`: parameters that no longer are the table they were tied to, and that table.
    """

    method: str
    num_blocks: int
    selection: str | list[int]
    seed: int = 0
    stacks: dict[str, bool] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)

    @classmethod
    def choose(cls, method: str, num_blocks: int, selection: str | list[int] | None, seed: int) -> Plan:
        check_choice("method", method, METHODS)
        check_whole("num_blocks", num_blocks, 2)
        if method == "sameup" and selection not in (None, "same"):
            raise UserError(f"selection={selection!r} does not fit method='sameup'; use method='altup'")
        return cls(method, num_blocks, METHODS[method] if selection is None else selection, seed)

    @classmethod
    def of(cls, model: nn.Module) -> Plan | None:
        saved = getattr(getattr(model, "config", None), "altup", None)
        return cls(**saved) if isinstance(saved, dict) else None

    def save(self, model: PreTrainedModel) -> None:
        """Into a config of the model's own: other models may have been built from the same one."""
        shared = model.config
        own = copy.deepcopy(shared)
        own.altup = asdict(self)
        for module in model.modules():
            for name in [name for name, value in vars(module).items() if value is shared]:
                setattr(module, name, own)

    @property
    def recycled(self) -> bool:
        return self.method == "recycled"

    def rule(self, num_layers: int) -> AltUp:
        """A stack's coefficients as they start: all blocks move together, and twins may part."""
        rule = AltUp(self.num_blocks, num_layers, self.selection)
        if rule.has_twins:
            rule.part_twins(generator=torch.Generator().manual_seed(self.seed))
        return rule


def shares(num_blocks: int) -> list[float]:
    """K powers of two that add up to one, as even as can be: exact to multiply with and to divide by.

    1/2 1/2, 1/2 1/4 1/4, 1/4 1/4 1/4 1/4, 1/4 1/4 1/4 1/8 1/8, …
    """
    parts = [1.0]
    while len(parts) < num_blocks:
        half = parts.pop(0) / 2
        parts += [half, half]
    return sorted(parts, reverse=True)


def layers_of(model: nn.Module, stack: str) -> list[Any]:
    return list(cast(nn.ModuleList, model.get_submodule(stack)))
