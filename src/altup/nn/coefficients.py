"""Coefficients of the update rules: few, and too important to round, so they stay float32 in any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class CoefficientModule(nn.Module):
    """A module whose own parameters `.to(torch.bfloat16)` and `.half()` leave in float32."""

    of_a_rule = True  # False for what must stay float32 without being a coefficient of an update rule
    compiled = False  # whether it is compiled where layers are: True for what is no kernel of its own
    from_data = False  # True where coefficients are made from the data, with weights that begin with zeros

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float16, torch.bfloat16) and tensor.is_floating_point():
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(keep_wide, recurse)


def coefficient(*shape: int) -> nn.Parameter:
    """A float32 parameter, whatever the default dtype is."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


def coefficient_names(model: nn.Module, scalars_alone: bool = False) -> set[str]:
    """The names of all parameters of `model` that are coefficients of an update rule.

    They have no weight decay and a learning rate of their own. With `scalars_alone` only those that are numbers
    of their own, and not made from the data.
    """
    rules = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, CoefficientModule) and module.of_a_rule and not (scalars_alone and module.from_data)
    ]
    return {f"{name}.{own}" if name else own for name, module in rules for own, _ in module.named_parameters()}
