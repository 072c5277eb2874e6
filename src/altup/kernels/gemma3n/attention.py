"""Causal attention as Gemma 3n has it: over a whole text, or within a window; over rows, or texts end to end.

Given a mask, SDPA computes all pairs of tokens, with a kernel that is slow for heads of 256, and the mask itself
is as large as all pairs. FlashAttention, which comes with PyTorch, takes the window as a number and the texts'
bounds as a list, skips what lies outside, and reads keys and values that several heads share where they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 256  # dimensions of a head that FlashAttention takes


class Segments(NamedTuple):
    """Texts end to end in one row: text i is tokens starts[i] to starts[i + 1] − 1, at most `longest` of them."""

    starts: Tensor  # int32, one more than there are texts
    longest: int
    blind: Tensor | None = None  # [tokens]: those that see nothing, not even themselves, each of them a text


def flash_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention takes heads like these; the GPU is asked for by the caller."""
    return dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= MOST


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, segments: Segments | None
) -> Tensor:
    """The definition, by SDPA with a mask. q: [batch, tokens, heads, D]; k, v may have fewer heads."""
    places = torch.arange(q.shape[1], device=q.device)
    behind = places[:, None] - places
    mask = behind >= 0
    if window is not None:
        mask &= behind < window
    if segments is not None:
        text = torch.bucketize(places, segments.starts[1:], right=True)
        mask &= text[:, None] == text
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return _without_blind(attended.transpose(1, 2), segments)


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, segments: Segments | None
) -> Tensor:
    shape, starts, longest = q.shape, None, q.shape[1]
    if segments is not None:
        starts, longest, _ = segments
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    left = -1 if window is None else window - 1
    attended = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, window is None, False,
        scale=scale, window_size_left=left, window_size_right=-1 if window is None else 0,
    )[0].view(shape)  # fmt: skip
    return _without_blind(attended, segments)


def _without_blind(attended: Tensor, segments: Segments | None) -> Tensor:
    if segments is None or segments.blind is None:
        return attended
    return attended.masked_fill(segments.blind[:, None, None], 0.0)
