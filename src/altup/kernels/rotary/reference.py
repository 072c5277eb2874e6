"""The definition of rotary positions in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (xᵢ, xᵢ₊ₕ), where h is half the width, by its angle; x: [batch, heads, tokens, width]."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def rotary_heads_reference(
    joined: Tensor, cosine: Tensor, sine: Tensor, queries: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """joined: [batch, tokens, (queries + 2·keys)·width], the heads' queries, keys and values side by side → turned
    queries, turned keys and values, [batch, heads, tokens, width]."""
    heads = joined.unflatten(-1, (queries + 2 * keys, -1)).transpose(1, 2)
    q, k, v = heads.split([queries, keys, keys], dim=1)
    return rotate(q, cosine, sine), rotate(k, cosine, sine), v
