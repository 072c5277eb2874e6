"""Normalisation over the last dimension, computed in float32 and given back in the dtype that came in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x − mean) / √(variance + ε) · weight + bias. Under autocast, torch's own would give back float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)
