"""Attention through PyTorch's own function, with bias and mask in one dense tensor where there are any."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.kernels.attention.reference import hidden_keys, lay_out


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    by_distance: Tensor | None,
    causal: bool,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    dropout: float,
    scale: float,
) -> Tensor:
    if bias is None and by_distance is None and query_segments is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)
    queries, keys = q.shape[2], k.shape[2]
    if by_distance is not None:
        dense = lay_out(by_distance, queries, keys)
        bias = dense if bias is None else bias + dense
    if bias is not None:
        bias = bias.to(q.dtype)
    hidden = hidden_keys(queries, keys, causal, query_segments, key_segments, q.device)
    if hidden is not None:
        bias = (q.new_zeros(()) if bias is None else bias).masked_fill(hidden, torch.finfo(q.dtype).min)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    if query_segments is not None and hidden is not None:
        out = out.masked_fill(hidden.all(-1, keepdim=True), 0)
    return out
