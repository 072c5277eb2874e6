"""Rotary positions: queries and keys are turned by angles that grow with their place in the text."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, width: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles positions · theta^(−2i/width), for i below width / 2, in float32.

    positions: [batch, tokens] → two tensors [batch, 1, tokens, width / 2] that broadcast over heads.
    """
    powers = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None, :, None].float() * (1.0 / theta**powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (xᵢ, xᵢ₊ₕ), where h is half the width, by its angle; x: [batch, heads, tokens, width]."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
