"""Softmax attention with an additive bias, as T5 has it: scores are not divided by √d."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(q·kᵀ + bias)·v.

    q: [batch, heads, queries, d_kv]; k, v: [batch, heads, keys, d_kv];
    bias: broadcastable to [batch, heads, queries, keys].
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
