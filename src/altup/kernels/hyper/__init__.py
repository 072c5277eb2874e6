"""Hyper-connections with coefficients from the data (mHC): x ← A·x + b ⊗ f(a·x), see `reference.py`.

`coefficients` makes a, b and A in one pass over the state, `read` gives what the layer f is given, `write` updates
the state with what f computed. A state is [..., K, d], as DeepSeek-V4 has it (`dim` −2), or [K, ..., d], as
altup's models have it (`dim` 0); neither is copied. `implementation` is "plain", "triton" (the kernels, or an
error) or "auto" (the kernels where they can run).
"""

from __future__ import annotations

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.altup_update_dynamic import mix_blocks
from altup.kernels.hyper.reference import (
    Maps,
    coefficients_reference,
    read_reference,
    scales,
    sinkhorn_reference,
    write_reference,
)
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = [
    "Maps",
    "coefficients",
    "coefficients_reference",
    "read",
    "read_reference",
    "sinkhorn_reference",
    "write",
    "write_reference",
]

MOST_BLOCKS = 8


def coefficients(
    x: Tensor, maps: Maps, implementation: str = "auto", dim: int = -2
) -> tuple[Tensor, Tensor, Tensor]:
    """a: [..., K], b: [..., K] and A: [..., K, K] in float32, for each token of a state."""
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    K, d = x.shape[dim], x.shape[-1]
    M = 2 * K + K * K
    if maps.weight.shape != (M, K * d) or maps.base.shape != (M,) or maps.scale.shape != (3,) or maps.rounds < 1:
        raise UserError(
            f"weight {list(maps.weight.shape)}, base {list(maps.base.shape)}, scale {list(maps.scale.shape)} and "
            f"{maps.rounds} rounds do not fit a state of {K} blocks, {list(x.shape)}"
        )
    fits = 2 <= K <= MOST_BLOCKS and x.dtype in FUSED_DTYPES and x.numel() > 0
    if implementation == "auto":
        implementation = "triton" if fits and runs_triton(x.device) else "plain"
    if implementation == "plain":
        with torch.autocast(x.device.type, enabled=False):
            return coefficients_reference(x if dim == -2 else x.movedim(0, -2), maps)
    if not (fits and can_launch(x.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton and 2 to {MOST_BLOCKS} blocks in 16 or 32 bits, "
            f"not {K} of {x.dtype} on {x.device}; use 'auto' or 'plain'"
        )
    from altup.kernels.hyper.triton import from_logits, logits

    w, _ = logits(x, maps.weight.float(), maps.norm_eps, dim)
    u = w * scales(maps.scale, K).float() + maps.base.float()
    a, b, mix = from_logits(u, maps.eps, maps.rounds, K)
    return a, b, mix.transpose(-1, -2)


def read(x: Tensor, a: Tensor, implementation: str = "auto", dim: int = -2) -> Tensor:
    """a·x: [..., d], in x's dtype."""
    return mix_blocks(x, a.unsqueeze(-2), implementation=implementation, dim=dim).squeeze(dim)  # type: ignore[union-attr]


def write(x: Tensor, y: Tensor, b: Tensor, A: Tensor, implementation: str = "auto", dim: int = -2) -> Tensor:
    """A·x + b ⊗ y: a state like x, in its dtype."""
    return mix_blocks(x, A, y, b, implementation, dim)  # type: ignore[return-value]
