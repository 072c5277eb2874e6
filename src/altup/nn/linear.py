"""When a linear map's weight may be taken for the map."""

from __future__ import annotations

from torch import nn


def is_bare(module: nn.Module, bias: bool = False) -> bool:
    """Whether `module(x)` is x·weightᵀ (+ bias) and nothing else happens: no adapter stands in its place, nobody
    has hooked or replaced its forward, and there is a bias just if `bias`."""
    return (
        type(module) is nn.Linear
        and (module.bias is not None) == bias
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )
