"""Attention masks as numbers to add to the scores: 0 where a key is seen, the lowest number where it is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from altup.core.errors import UserError


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `seen`; a row that sees nothing stays finite."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zero, torch.finfo(dtype).min)


def key_mask(mask: Tensor | None, keys: int, dtype: torch.dtype) -> Tensor | None:
    """[batch, keys], 1 for a real token → [batch, 1, 1, keys].

    [batch, 1, queries, keys] goes through, see `seen_by_query`.
    """
    if mask is None:
        return None
    if mask.dim() == 4:
        return additive(seen_by_query(mask), dtype)
    check_mask(mask, keys, keys)
    return additive(mask[:, None, None, :] != 0, dtype)


def seen_by_query(mask: Tensor) -> Tensor:
    """A whole mask as truth: it is true or a whole number that is not 0, or to be added and not negative, where a
    key is seen."""
    return mask >= 0 if mask.is_floating_point() else mask != 0


def check_mask(mask: Tensor, least: int, most: int) -> None:
    if mask.dim() != 2:
        raise UserError(
            f"attention_mask is {list(mask.shape)}; give [batch, tokens], or [batch, 1, queries, keys] where a "
            "decoder or BERT is to see just that"
        )
    if not least <= mask.shape[1] <= most:
        raise UserError(f"attention_mask is {mask.shape[1]} long for {most} tokens; they must agree")


def causal_mask(
    mask: Tensor | None, queries: int, cache: Cache | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Any]:
    """The mask of `queries` new tokens behind those in `cache`, and how many those are.

    None where nothing but the future is hidden from whole sequences: attention does that by itself.
    A whole mask, [batch, 1, queries, keys], is taken as it is: it hides the future already.
    """
    past, keys = cached_lengths(cache, queries)
    if mask is not None and mask.dim() == 4:
        return key_mask(mask, keys, dtype), past
    if mask is None and cache is None:
        return None, past
    places = torch.arange(queries, device=device) + past
    seen = (torch.arange(keys, device=device) <= places[:, None])[None, None]
    if mask is not None:
        check_mask(mask, queries if isinstance(past, Tensor) else past + queries, keys)
        # Places of a static cache that are not filled yet lie in the future and are hidden as such.
        real = torch.nn.functional.pad(mask != 0, (0, keys - mask.shape[1]), value=True)
        seen = seen & real[:, None, None, :]
    return additive(seen, dtype), past


def token_positions(mask: Tensor | None, queries: int, past: Any, device: torch.device) -> Tensor:
    """The place of each new token in its text, [batch, queries]: padding does not count."""
    places = (torch.arange(queries, device=device) + past).unsqueeze(0)
    if mask is None or mask.dim() != 2:
        return places
    counted = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    return counted.gather(1, places.expand(mask.shape[0], -1))


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
