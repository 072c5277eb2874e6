"""Softmax attention with an additive bias, as T5 has it: scores are not divided by √d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def lay_out(by_distance: Tensor, queries: int, keys: int) -> Tensor:
    """[heads, queries + keys − 1] by distance → [1, heads, queries, keys]."""
    return by_distance.unfold(1, keys, 1).flip(1).unsqueeze(0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    by_distance: Tensor | None = None,
    causal: bool = False,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    constant_beyond: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q·kᵀ + bias)·v.

    q: [batch, heads, queries, d_kv]; k, v: [batch, heads, keys, d_kv];
    bias: broadcastable to [batch, heads, queries, keys].
    """
    queries, keys = q.shape[2], k.shape[2]
    if by_distance is not None:
        bias = lay_out(by_distance, queries, keys)
    hidden = None
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
    if query_segments is not None and key_segments is not None:
        other = (query_segments[:, :, None] != key_segments[:, None, :])[:, None]
        hidden = other if hidden is None else hidden | other
    if bias is not None:
        bias = bias.to(q.dtype)
    if hidden is not None:
        bias = (q.new_zeros(()) if bias is None else bias).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
