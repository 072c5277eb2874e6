"""What attention is: the definition in plain PyTorch, in the precision of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def lay_out(by_distance: Tensor, queries: int, keys: int) -> Tensor:
    """[heads, queries + keys − 1] by distance → [1, heads, queries, keys]."""
    return by_distance.unfold(1, keys, 1).flip(1).unsqueeze(0)


def hidden_keys(
    queries: int,
    keys: int,
    causal: bool,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """True where a query must not see a key, broadcastable to [batch, heads, queries, keys]; None: all is seen."""
    hidden = None
    if causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
    if query_segments is not None and key_segments is not None:
        other = (query_segments[:, :, None] != key_segments[:, None, :])[:, None]
        hidden = other if hidden is None else hidden | other
    return hidden


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    by_distance: Tensor | None = None,
    causal: bool = False,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """As `altup.kernels.attention`; which weights dropout keeps is given, [batch, heads, queries, keys]."""
    queries, keys = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if by_distance is not None:
        scores = scores + lay_out(by_distance, queries, keys)
    hidden = hidden_keys(queries, keys, causal, query_segments, key_segments, q.device)
    if hidden is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(hidden, 0)
    if keep is not None:
        weights = weights * keep / (1 - dropout)
    return weights @ v


def keep_mask(seed: int, batch: int, heads: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights the kernels keep under a seed: bool [batch, heads, queries, keys].

    Philox 4×32 of the counter (i, j, batch·heads + head, 0), both i and j without their bit 3, gives four words;
    bit 3 of i and of j choose among them, and a weight is kept if its word's upper 31 bits reach dropout · 2³¹.
    """
    i = torch.arange(queries)[:, None]
    j = torch.arange(keys)[None, :]
    stream = torch.arange(batch * heads)[:, None, None]
    counter = torch.broadcast_tensors(i & ~8, j & ~8, stream, torch.zeros((), dtype=torch.long))
    words = _philox(seed, *(c.clone() for c in counter))
    upper = torch.where(j & 8 == 0, words[0], words[1])
    lower = torch.where(j & 8 == 0, words[2], words[3])
    word = torch.where(i & 8 == 0, upper, lower)
    return ((word >> 1) >= round(dropout * 2**31)).view(batch, heads, queries, keys)


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    low = 0xFFFFFFFF
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        # 32 × 32 bits do not fit in a signed 64-bit word: multiply by halves.
        high0, low0 = _multiply(0xD2511F53, c0)
        high2, low2 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of a product of two 32-bit numbers."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    total = lower + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (total >> 32), total & 0xFFFFFFFF
