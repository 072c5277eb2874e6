"""The definition of attention in plain PyTorch, in the precision of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from altup.kernels.dropout.reference import dropped, is_kept, keep_scale, stream_keys, stream_words

SQUARE = 64  # queries and keys whose decisions lie together
WORDS = SQUARE * SQUARE // 32  # of a square
DRAWS = 16  # random bits of a decision


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
        weights = weights * keep * keep_scale(dropout)
    return weights @ v


def keep_mask(seed: int, batch: int, heads: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights the kernels keep under a seed: bool [batch, heads, queries, keys].

    Each sequence and head is a stream. The counter (i, j), both without their bit 3, gives two words: bit 3 of
    i chooses the word and bit 3 of j its half, the lower first, which decides.
    """
    i = torch.arange(queries)[:, None]
    j = torch.arange(keys)[None, :]
    stream = stream_keys(seed, torch.arange(batch * heads)[:, None, None])
    c0, c1 = torch.broadcast_tensors(i & ~8, j & ~8)
    word = torch.where(i & 8 == 0, *stream_words(stream, c0, c1))
    half = torch.where(j & 8 == 0, word & 0xFFFF, word >> 16)
    return is_kept(half, dropout).view(batch, heads, queries, keys)


def keep_bits_reference(seed: int, streams: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights are kept, as bits: int32 [streams, squares, WORDS].

    The squares of 64 queries × 64 keys follow one another along the keys. Within a square, the pair (i, j) is in
    the word whose number has bits 2, 1 and 0 of i, the same of j, and bit 5 of i; its bit there has bit 4 of i,
    5 and 4 of j, 3 of i, 3 of j. Word w of the square in row r and column c compares 32 random numbers of 16 bits
    with a threshold: bit b of all of them is a word of the counter (128·r + w, 8·c + b // 2), the first word where
    b is even.
    """
    rows, columns = -(-queries // SQUARE), -(-keys // SQUARE)
    stream = stream_keys(seed, torch.arange(streams)[:, None, None, None])
    c0 = WORDS * torch.arange(rows)[:, None, None] + torch.arange(WORDS)
    c1 = DRAWS // 2 * torch.arange(columns)[:, None]
    less = torch.zeros((), dtype=torch.long)
    for bit in range(DRAWS):
        drawn = stream_words(stream, *torch.broadcast_tensors(c0, c1 + bit // 2))[bit % 2]
        less = less | drawn if dropped(dropout) >> bit & 1 else less & drawn
    return (~less).to(torch.int32).flatten(1, 2)


def unpack_bits(kept: Tensor, queries: int, keys: int) -> Tensor:
    """What `keep_bits_reference` gives → bool [streams, queries, keys]."""
    i = torch.arange(queries, device=kept.device)[:, None]
    j = torch.arange(keys, device=kept.device)[None, :]
    word = kept[:, i // SQUARE * -(-keys // SQUARE) + j // SQUARE, 16 * (i % 8) + 2 * (j % 8) + i // 32 % 2]
    offset = 16 * (i // 16 % 2) + 4 * (j // 16 % 4) + 2 * (i // 8 % 2) + j // 8 % 2
    return (word >> offset & 1).bool()
