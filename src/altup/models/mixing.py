"""A class mixed into the class of someone else's module, in place: its weights, their names and its hooks stay."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

OWN = ("__dict__", "__weakref__", "forward")  # of a class: transformers binds `forward` anew in each subclass


def original_class(part: nn.Module, mixed: type) -> type[nn.Module]:
    """The class that `mixed` was put before, whatever was mixed in afterwards (FSDP does so too)."""
    classes = type(part).__mro__
    return classes[classes.index(mixed) + 1]


def class_without_fsdp(part: nn.Module) -> type[nn.Module]:
    """FSDP2 gives a sharded module a class made of `FSDPModule` and the module's own."""
    kind: Any = type(part)
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def change_class(part: nn.Module, cls: type[nn.Module]) -> None:
    kind: Any = type(part)
    if class_without_fsdp(part) is not kind:
        members = {name: value for name, value in vars(kind).items() if name not in OWN}
        cls = type(f"FSDP{cls.__name__}", (kind.__mro__[1], cls), members)
    part.__class__ = cls
    if "_old_forward" in vars(part):  # by accelerate, whose hooks call the forward they found
        part._old_forward = cast(Any, cls.forward.__get__(part))
