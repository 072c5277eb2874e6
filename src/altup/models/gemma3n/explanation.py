"""What the parts of a Gemma 3n run on, and why: for `altup.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from altup.kernels.altup_update import FUSED_BLOCKS
from altup.kernels.launch import FUSED_DTYPES, runs_triton
from altup.models.gemma3n.classes import MIXED_IN, differences
from altup.models.gemma3n.head import FusedHead
from altup.models.gemma3n.parts import (
    Fused,
    FusedAltUp,
    FusedAttention,
    FusedDecoderLayer,
    FusedMLP,
    FusedNorm,
    is_bare_norm,
)
from altup.models.gemma3n.text_model import FusedTextModel
from altup.models.mixing import class_without_fsdp

ROWS, GENERATE = "padded and packed rows", "generate as CUDA graphs"
NAMES: dict[Any, tuple[str, ...]] = {
    FusedNorm: ("norm",),
    FusedMLP: ("gate of the feed-forward network",),
    FusedAttention: ("norm and rotary positions",),
    FusedAltUp: ("AltUp (predict, correct)",),
    FusedDecoderLayer: ("correction with the per-layer input", "additions with norms"),
    FusedTextModel: ("projections at both ends", "attention within windows", ROWS),
    FusedHead: ("loss without logits", GENERATE),
}


def parts(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(name, runs, why) for every part."""
    refused = differences()
    weight = next(model.parameters())
    for part in model.modules():
        kind: Any = class_without_fsdp(part)
        mixed = MIXED_IN.get(kind)
        if mixed is not None:
            why = f"transformers computes it otherwise: {refused[kind]}" if kind in refused else "not accelerated"
            for name in _names(mixed):
                yield name, "original", why
        elif isinstance(part, Fused):
            for name, obstacle in _obstacles(part).items():
                why = obstacle or _device_obstacle(name, part, weight) or ""
                runs = "plain" if part.implementation == "plain" else "kernel"
                yield name, "original" if why else runs, why


def _names(kind: Any) -> tuple[str, ...]:
    return next(names for base, names in NAMES.items() if issubclass(kind, base))


def _device_obstacle(name: str, part: Any, weight: Tensor) -> str | None:
    """Why nothing of the name runs on kernels with weights like this one."""
    if part.implementation == "plain" and name != GENERATE:
        return None
    if not runs_triton(weight.device):
        return f"no GPU that Triton supports ({weight.device})"
    if weight.is_floating_point() and weight.dtype not in FUSED_DTYPES:
        return f"its weights are {weight.dtype}"
    return part.rows_obstacle(part.embed_tokens.weight.dtype) if name == ROWS else None


def _obstacles(part: Any) -> dict[str, str | None]:
    """By name of what a part brings, why it does not, wherever it is."""
    reasons: tuple[str | None, ...]
    if isinstance(part, FusedAltUp):
        K = part.config.altup_num_inputs
        fits = 2 <= K <= FUSED_BLOCKS
        reasons = (part.obstacle() or (None if fits else f"{K} blocks, not 2 to {FUSED_BLOCKS}"),)
    elif isinstance(part, FusedNorm):
        reasons = (None if is_bare_norm(part) else "a hook is registered on it",)
    elif isinstance(part, FusedDecoderLayer):
        reasons = part.obstacle(), part.additions_obstacle()
    elif isinstance(part, FusedTextModel):
        reasons = None, part.masks_obstacle(), part.masks_obstacle()
    elif isinstance(part, FusedHead):
        replaced = "forward" in vars(part) and "_hf_hook" not in vars(part)
        reasons = part.obstacle() or ("it has another forward" if replaced else None), part.replay_obstacle()
    else:
        reasons = (part.obstacle(),)
    return dict(zip(_names(type(part)), reasons, strict=True))


def fallen_back(model: nn.Module) -> str:
    """One line on what runs the original code in an accelerated model, wherever it is; `generate` warns itself."""
    found = Counter(
        (name, why)
        for part in model.modules()
        if isinstance(part, Fused)
        for name, why in _obstacles(part).items()
        if why and name != GENERATE
    )
    if not found:
        return ""
    (name, why), count = next(iter(found.items()))
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"the original code runs for {name} in {count} parts ({why}){more}"
