"""What the operators share: a state's blocks, and sums over tokens for the weights' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from altup.kernels.launch import without_autocast

ROUTER = "Tensor weight, Tensor norm, float eps"  # of an operator's schema


def router_numbers(block: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Places for the router's numbers and 1 / rms."""
    tokens = block.shape[:-1]
    return block.new_empty(*tokens, K, dtype=torch.float32), block.new_empty(tokens, dtype=torch.float32)


def blocks_of(state: Sequence[Tensor]) -> Sequence[Tensor]:
    """The K blocks of either kind of state; K ≥ 2."""
    return state[0].unbind(0) if len(state) == 1 else state


def router_gradients(
    x: Tensor, d_routed: Tensor, inverses: Tensor, weight: Tensor, norm: Tensor, weight_grad: bool, norm_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the router and of its norm's scale, from Z = Σ over tokens of (∂routed / rms) ⊗ x: [K, d]."""
    if not (weight_grad or norm_grad):
        return None, None
    Z = outer_sum(d_routed * (inverses / x.shape[-1]).unsqueeze(-1), x)
    return (
        (Z * norm.float()).to(weight.dtype) if weight_grad else None,
        (Z * weight.float()).sum(dim=0).to(norm.dtype) if norm_grad else None,
    )


def outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """Σ over tokens of a ⊗ b: [..., n], [..., m] → [n, m] in float32; a is rounded to b's dtype."""
    a, b = a.flatten(0, -2).t(), b.flatten(0, -2)
    with without_autocast(b.device.type):
        if b.is_cuda and b.dtype != torch.float32:
            return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
        return a.float() @ b.float()
