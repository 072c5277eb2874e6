"""Giving the parts of a Gemma 3n their fused classes, and their own classes back.

A fused class repeats what its own class computes, so it is only given to a part whose code is the code that was
repeated: another version of transformers may compute something else. What is not known stays as it is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from typing import Any, cast

from torch import nn
from transformers.models.gemma3n import modeling_gemma3n as theirs

from altup.core.errors import UserError
from altup.models.gemma3n.head import FusedHead, FusedMultimodalHead, FusedTextHead
from altup.models.gemma3n.parts import Fused, FusedAltUp, FusedAttention, FusedDecoderLayer, FusedMLP, FusedNorm
from altup.models.gemma3n.text_model import FusedTextModel
from altup.models.mixing import change_class, original_class

MIXED_IN: dict[type[nn.Module], type[Fused]] = {
    theirs.Gemma3nRMSNorm: FusedNorm,
    theirs.Gemma3nTextMLP: FusedMLP,
    theirs.Gemma3nTextAttention: FusedAttention,
    theirs.Gemma3nTextAltUp: FusedAltUp,
    theirs.Gemma3nTextDecoderLayer: FusedDecoderLayer,
    theirs.Gemma3nTextModel: FusedTextModel,
    theirs.Gemma3nForCausalLM: FusedTextHead,
    theirs.Gemma3nForConditionalGeneration: FusedMultimodalHead,
}
# What a fused class repeats, and the digests of its code that are known (transformers 5.17 to 5.22).
REPEATED: dict[Any, list[tuple[Any, tuple[str, ...]]]] = {
    theirs.Gemma3nRMSNorm: [(theirs.Gemma3nRMSNorm, ("_norm", "forward"))],
    theirs.Gemma3nTextMLP: [(theirs.Gemma3nTextMLP, ("forward", "_gaussian_topk"))],
    theirs.Gemma3nTextAttention: [
        (theirs.Gemma3nTextAttention, ("forward",)),
        (theirs.Gemma3nRMSNorm, ("_norm", "forward")),
        (theirs, ("apply_rotary_pos_emb", "rotate_half")),
    ],
    theirs.Gemma3nTextAltUp: [
        (theirs.Gemma3nTextAltUp, ("compute_router_modalities", "predict", "correct", "forward")),
        (theirs.Gemma3nRMSNorm, ("_norm", "forward")),
    ],
    theirs.Gemma3nTextDecoderLayer: [
        (theirs.Gemma3nTextDecoderLayer, ("forward",)),
        (theirs.Gemma3nTextAltUp, ("scale_corrected_output",)),
        (theirs.Gemma3nTextLaurelBlock, ("forward",)),
    ],
    theirs.Gemma3nTextModel: [(theirs.Gemma3nTextModel, ("forward",))],
    theirs.Gemma3nForCausalLM: [(theirs.Gemma3nForCausalLM, ("forward",))],
    theirs.Gemma3nForConditionalGeneration: [(theirs.Gemma3nForConditionalGeneration, ("forward",))],
}
KNOWN = {
    "Gemma3nRMSNorm": {"99f8a2c2b053cd53"},
    "Gemma3nTextMLP": {"e15ea03b290a917a"},
    "Gemma3nTextAttention": {"18e6cc5315392116"},
    "Gemma3nTextAltUp": {"6d4b257b1582e7a1"},
    "Gemma3nTextDecoderLayer": {"6e3bd558ace937f6"},
    "Gemma3nTextModel": {"670347dcc352d7e6"},
    "Gemma3nForCausalLM": {"9a5097aa38523e5b", "ed7cbdf92c024d24"},
    "Gemma3nForConditionalGeneration": {"ca3fdd4c1e3f2c07", "aafded5c0b80dbea"},
}


def digest(base: type[nn.Module]) -> str:
    """Of all code that the fused class of `base` repeats, without comments, docstrings and layout."""
    whole = hashlib.blake2b(digest_size=8)
    for cls, names in REPEATED[base]:
        for name in names:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(cls, name)))))
            function = cast(ast.FunctionDef, tree.body[0])
            if ast.get_docstring(function) is not None:
                function.body = function.body[1:]
            whole.update(ast.unparse(function).encode())
    return whole.hexdigest()


@functools.cache
def is_known(base: Any) -> bool:
    try:
        return digest(base) in KNOWN[base.__name__]
    except (OSError, TypeError):  # no source to read
        return False


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


def fuse(model: nn.Module, implementation: str, head: bool, remake: bool = False) -> list[str]:
    """Give every part of `model` its fused class; gives the names of the classes whose code is not known."""
    unknown = []
    for part in model.modules():
        kind: Any = type(part)
        if kind in MIXED_IN:
            if not is_known(kind):
                unknown.append(kind.__name__)
                continue
            change_class(part, fused_class(kind))
        if isinstance(part, Fused):
            part.implementation, part.remakes = implementation, remake
        if isinstance(part, FusedHead):
            part.fuses_head = head
    return sorted(set(unknown))


def unfuse(model: nn.Module) -> None:
    """Give every fused part of `model` its own class back."""
    for part in model.modules():
        if isinstance(part, Fused):
            own: Any = original_class(part, Fused)
            if type(part) is not fused_class(own):
                raise UserError(
                    f"{type(part).__name__} was wrapped after altup.accelerate (by FSDP, say); unwrap it before "
                    "altup.decelerate"
                )
            change_class(part, own)
            for name in ("implementation", "fuses_head", "remakes"):
                vars(part).pop(name, None)
