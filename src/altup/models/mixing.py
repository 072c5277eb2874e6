"""A class mixed into the class of someone else's module, in place: its weights, their names and its hooks stay."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def original_class(part: nn.Module, mixed: type) -> type[nn.Module]:
    """The class that `mixed` was put before, whatever was mixed in afterwards (FSDP does so too)."""
    classes = type(part).__mro__
    return classes[classes.index(mixed) + 1]


def change_class(part: nn.Module, cls: type[nn.Module]) -> None:
    part.__class__ = cls
    if "_old_forward" in vars(part):  # by accelerate, whose hooks call the forward they found
        part._old_forward = cast(Any, cls.forward.__get__(part))
