"""Compiling a model layer by layer: one layer's code serves all its likes, so that depth adds no start-up."""

from __future__ import annotations

import torch
from torch import nn

from altup.nn import AveragePooling, RMSNorm
from altup.nn.dynamic import DynamicUpdate
from altup.nn.sequence import SequenceUpdate

# What stands between the layers and is no kernel of its own.
BETWEEN = (RMSNorm, SequenceUpdate, AveragePooling, DynamicUpdate)
# Kinds of layers × of inputs (training, evaluation, padded, packed) that one process may meet.
RECOMPILE_LIMIT = 64


def compile_layers(model: nn.Module, **options: object) -> nn.Module:
    """Compile the layers of `model` in place, and what few operations stand between them.

    The static update rule is a kernel already and stays outside. `options` go to `torch.compile`; with
    `dynamic=None` a size that is seen to vary is compiled once for all its values, instead of once for each.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    inside: set[nn.Module] = set()
    options = {"dynamic": False, **options}
    for module in model.modules():
        if hasattr(module, "compile_ends"):
            module.compile_ends(**options)  # type: ignore[operator]
        if module in inside:
            continue
        if type(module).__name__ in layers or isinstance(module, BETWEEN):
            inside.update(module.modules())
            module.compile(**options)
    return model


def left_uncompiled() -> list[str]:
    """Why torch.compile gave up on parts of this process's code so far: those run, but slowly."""
    counts = torch._dynamo.utils.counters
    return [reason.splitlines()[0] for kind in ("graph_break", "unimplemented") for reason in counts[kind]]
