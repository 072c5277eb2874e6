"""Giving the parts of a Gemma 3n their fused classes, and their own classes back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.models.gemma3n import modeling_gemma3n

from altup.core.errors import UserError
from altup.models.gemma3n import recognition
from altup.models.gemma3n.head import FusedHead, FusedMultimodalHead, FusedTextHead
from altup.models.gemma3n.parts import Fused, FusedAltUp, FusedAttention, FusedDecoderLayer, FusedMLP, FusedNorm
from altup.models.gemma3n.text_model import FusedTextModel
from altup.models.mixing import change_class, class_without_fsdp, original_class

hf: Any = modeling_gemma3n
MIXED_IN: dict[Any, type[Fused]] = {
    hf.Gemma3nRMSNorm: FusedNorm,
    hf.Gemma3nTextMLP: FusedMLP,
    hf.Gemma3nTextAttention: FusedAttention,
    hf.Gemma3nTextAltUp: FusedAltUp,
    hf.Gemma3nTextDecoderLayer: FusedDecoderLayer,
    hf.Gemma3nTextModel: FusedTextModel,
    hf.Gemma3nForCausalLM: FusedTextHead,
    hf.Gemma3nForConditionalGeneration: FusedMultimodalHead,
}


@functools.cache
def differences() -> dict[Any, str]:
    """By class of the installed transformers that altup does not replace, why not."""
    return recognition.differences(MIXED_IN, lambda model, classes: _change_classes(model, classes, "plain"))


@functools.cache
def fused_class(base: Any) -> type[nn.Module]:
    """Named as `base`, which transformers, accelerate and PEFT ask for by name."""
    mixed = MIXED_IN[base]

    def reduce(self: Any, protocol: Any) -> tuple:
        return blank, (base,), self.__getstate__()

    members: dict[str, Any] = {"__module__": base.__module__, "__reduce_ex__": reduce}
    if issubclass(mixed, FusedHead):

        def forward(self: Any, *args: Any, **given: Any) -> Any:
            return mixed.forward(self, *args, **given)

        members["forward"] = functools.wraps(base.forward)(forward)
        members["names"] = tuple(inspect.signature(base.forward).parameters)[1:]
    return type(base.__name__, (mixed, base), members)


def blank(base: Any) -> nn.Module:
    """What unpickling fills: classes made on the fly cannot be found by name."""
    cls = fused_class(base)
    return cls.__new__(cls)


def fuse(model: nn.Module, implementation: str, head: bool, remake: bool = False) -> dict[str, str]:
    """Give every part of `model` its fused class; gives the classes that altup does not replace, and why."""
    refused = differences()
    _change_classes(model, MIXED_IN.keys() - refused.keys(), implementation, head, remake)
    kinds = set(map(class_without_fsdp, model.modules()))
    return {base.__name__: reason for base, reason in refused.items() if base in kinds}


def _change_classes(
    model: nn.Module, bases: Collection[Any], implementation: str, head: bool = True, remake: bool = False
) -> None:
    for part in model.modules():
        kind: Any = class_without_fsdp(part)
        if kind in bases:
            change_class(part, fused_class(kind))
        if isinstance(part, Fused):
            part.implementation, part.remakes = implementation, remake
        if isinstance(part, FusedHead):
            part.fuses_head = head


def unfuse(model: nn.Module) -> None:
    """Give every fused part of `model` its own class back."""
    for part in model.modules():
        if isinstance(part, Fused):
            own: Any = original_class(part, Fused)
            if class_without_fsdp(part) is not fused_class(own):
                raise UserError(
                    f"{type(part).__name__} was wrapped after altup.accelerate; unwrap it before altup.decelerate"
                )
            change_class(part, own)
            for name in ("implementation", "fuses_head", "remakes"):
                vars(part).pop(name, None)
