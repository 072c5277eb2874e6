"""Self-attention as BERT and today's decoders have it: scores divided by √d, biases, shared keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from altup.nn.rotary import rotate

if TYPE_CHECKING:
    from transformers import Cache


class GroupedAttention(nn.Module):
    """softmax(q·kᵀ/√d_kv + mask)·v, where each of `num_kv_heads` keys and values serves a group of query heads.

    `index` is the layer's place in its stack, under which keys and values are kept in a cache.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        d_kv: int,
        num_kv_heads: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        index: int = 0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        self.d_kv = d_kv
        self.group = num_heads // num_kv_heads
        self.dropout = dropout
        self.index = index
        self.q = nn.Linear(width, num_heads * d_kv, bias=bias)
        self.k = nn.Linear(width, num_kv_heads * d_kv, bias=bias)
        self.v = nn.Linear(width, num_kv_heads * d_kv, bias=bias)
        self.o = nn.Linear(num_heads * d_kv, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        causal: bool = False,
    ) -> Tensor:
        """x: [batch, tokens, width]; mask: what is added to scores, broadcastable to [batch, heads, tokens, keys].

        `causal` hides the future where there is no mask; a mask must hide it itself.
        """
        q, k, v = (linear(x).unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        if self.group > 1 and mask is not None:
            # With a mask, no fused kernel reads shared heads.
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.to(q.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and mask is None,
            enable_gqa=self.group > 1 and mask is None,
        )
        return self.o(mixed.transpose(1, 2).flatten(2))
