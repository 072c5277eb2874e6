"""Causal attention within a window, as Gemma 3n's sliding layers have it: token t sees tokens t − window + 1 to t.

Given a mask, SDPA computes all pairs of tokens, with a kernel that is slow for heads of 256. FlashAttention, which
comes with PyTorch, takes the window as a number, skips what lies outside of it, and reads keys and values that
several heads share where they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 256  # dimensions of a head that FlashAttention takes


def uses_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes heads like these; the GPU is asked for by the caller."""
    return (
        q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST
    )


def window_reference(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """The definition, by SDPA with a mask. q: [batch, tokens, heads, D]; k, v may have fewer heads."""
    places = torch.arange(q.shape[1], device=q.device)
    behind = places[:, None] - places
    mask = (behind >= 0) & (behind < window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def window_flash(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    tokens = q.shape[1]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, tokens, tokens, 0.0, False, False,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )[0]  # fmt: skip
