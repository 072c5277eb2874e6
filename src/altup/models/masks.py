"""Attention masks: from what a caller gives to what attention reads.

A caller gives [batch, keys], 1 for a real token; or [batch, 1, queries, keys], which says for each query what it
sees; or, for packed rows, the number of each token's text. T5's attention reads `Seen`; that of BERT and of the
decoder adds numbers to the scores: 0 where a key is seen, the lowest number where it is not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from altup.core.errors import UserError
from altup.nn.attention import Seen


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`; a row that sees nothing stays finite."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zero, torch.finfo(dtype).min)


def key_mask(mask: Tensor | None, keys: int, dtype: torch.dtype) -> Tensor | None:
    """[batch, keys] → [batch, 1, 1, keys], to be added; [batch, 1, queries, keys] keeps its shape."""
    if mask is None:
        return None
    if mask.dim() == 4:
        return additive(seen_by_query(mask), dtype)
    check_mask(mask, keys, keys)
    return additive(mask[:, None, None, :] != 0, dtype)


def causal_mask(
    mask: Tensor | None, queries: int, cache: Cache | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Any]:
    """The mask to be added for `queries` new tokens behind those in `cache`, and how many those are.

    None where nothing but the future is hidden from whole sequences: attention does that by itself.
    A whole mask, [batch, 1, queries, keys], is taken as it is: it hides the future already.
    """
    past, keys = cached_lengths(cache, queries)
    if mask is not None and mask.dim() == 4:
        return key_mask(mask, keys, dtype), past
    if mask is None and cache is None:
        return None, past
    if mask is not None and not isinstance(past, Tensor):
        check_mask(mask, past + queries, keys)
    return additive(visible_keys(mask, queries, keys, past, device), dtype), past


def visible_keys(mask: Tensor | None, queries: int, keys: int, past: Any, device: torch.device) -> Tensor:
    """[batch or 1, 1, queries, keys]: which keys are seen by `queries` tokens that stand behind `past` others.

    Those that are not in their future and that `mask` does not hide: [batch, keys so far], or whole.
    """
    positions = torch.arange(queries, device=device) + past
    seen = (torch.arange(keys, device=device) <= positions[:, None])[None, None]
    if mask is None:
        return seen
    if mask.dim() == 4:
        return seen & seen_by_query(mask)
    check_mask(mask, queries, keys)
    # Places of a static cache that are not filled yet lie in the future and are hidden as such.
    real = F.pad(mask != 0, (0, keys - mask.shape[1]), value=True)
    return seen & real[:, None, None, :]


def seen_by_query(mask: Tensor) -> Tensor:
    """A whole mask as truth values: a key is seen where it is true, a whole number other than 0, or, of numbers
    that are to be added, one that is not negative."""
    return mask >= 0 if mask.is_floating_point() else mask != 0


def see_keys(mask: Tensor | None, queries: int, keys: int, causal: bool = False) -> Seen:
    """What whole sequences see: the keys where `mask` [batch, keys] is not 0."""
    if mask is None:
        return Seen(causal)
    check_mask(mask, keys, keys)
    real = (mask != 0).to(torch.int32)
    return Seen(causal, torch.ones_like(real[:, :1]).expand(-1, queries), real)


def check_mask(mask: Tensor, least: int, most: int) -> None:
    if mask.dim() != 2:
        raise UserError(
            f"attention_mask is {list(mask.shape)}; give [batch, tokens], or [batch, 1, queries, keys] where a "
            "decoder or BERT is to see just that"
        )
    if not least <= mask.shape[1] <= most:
        raise UserError(f"attention_mask is {mask.shape[1]} long for {most} tokens; they must agree")


def check_segments(name: str, segments: Tensor | None, tokens: Tensor, mask: Tensor | None) -> None:
    """`segments` must number `tokens` [batch, tokens, width] one by one, and say all that a mask would."""
    if mask is not None:
        raise UserError(f"give either a mask or {name} (where padding is a segment of its own)")
    if segments is None or segments.shape != tokens.shape[:2]:
        shape = None if segments is None else list(segments.shape)
        raise UserError(f"{name} of shape {shape} does not number {list(tokens.shape[:2])} tokens")


def token_positions(mask: Tensor | None, queries: int, past: Any, device: torch.device) -> Tensor:
    """The position of each new token in its text, [batch, queries]: padding does not count."""
    positions = (torch.arange(queries, device=device) + past).unsqueeze(0)
    if mask is None or mask.dim() != 2:
        return positions
    counted = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return counted.gather(1, positions.expand(mask.shape[0], -1))


def segment_positions(segments: Tensor) -> Tensor:
    """The position of each token in its text, [batch, tokens]: how many before it have its number."""
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril(-1).sum(dim=-1)


def packed_mask(segments: Tensor) -> Tensor:
    """[batch, 1, tokens, tokens]: a token of a packed row sees those of its own text, up to itself."""
    return (segments[:, :, None] == segments[:, None, :]).tril()[:, None]


def cached_lengths(cache: Cache | None, queries: int) -> tuple[Any, int]:
    """How many tokens came before the queries, and how many keys attention will see.

    A static cache shows all its places; those not yet filled lie in the future and are hidden as such.
    """
    if cache is None:
        return 0, queries
    past = cache.get_seq_length()
    keys, _ = cache.get_mask_sizes(queries, 0)
    # A static cache counts in place: what was read here must not move on with it.
    return past.clone() if isinstance(past, Tensor) else past, keys
