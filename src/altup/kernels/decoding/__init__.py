"""A decoder's step for one new token of each row, as few kernels: it is bound by their number.

Up to seven rows a layer is eight: norm with queries, keys and values; attention over the cache; its output map
with the addition; norm with the queries of cross-attention; that; its output map; norm with both maps into the
feed-forward and its gate; the map out of it, with AltUp's update. From eight rows on it is twelve: six products,
and behind them both attentions, the gate and three additions with the next norm, which add up the products' parts
(`many_rows.py`). Definitions: `reference.py`. Sums run in float32. There are no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from altup.kernels.decoding.reference import attend_reference, linear_reference
from altup.kernels.launch import can_launch

if TYPE_CHECKING:
    from altup.kernels.decoding.attention import Parts

__all__ = [
    "add_and_norm",
    "attend_reference",
    "attend_to_cache",
    "attend_to_memory",
    "can_decode",
    "can_decode_many",
    "choose",
    "gate",
    "linear",
    "linear_and_update",
    "linear_reference",
    "product",
    "update_and_norm",
]

DTYPES = (torch.bfloat16, torch.float32)  # in float16 the rows before their norm could be too large
# From MANY_ROWS rows on a step is products and kernels between them. On an H200 one of T5-base takes 0.52 ms that
# way for 8 rows and 0.71 for 32, by the kernels of few rows 0.88 and 0.99; 0.79 for 64 and 1.20 for 128, as plain
# code 1.95 and 2.82. From 2 to 7 rows it was not timed, nor above 128.
MANY_ROWS, MOST_ROWS = 8, 1024


def can_decode(device: torch.device, dtype: torch.dtype, rows: int, d_kv: int, num_blocks: int = 1) -> bool:
    """Whether the kernels of few rows take so many of a model that computes in `dtype`; of AltUp one."""
    return rows < (MANY_ROWS if num_blocks == 1 else 2) and _can_attend(device, dtype, d_kv)


def can_decode_many(device: torch.device, dtype: torch.dtype, rows: int, d_kv: int) -> bool:
    """Whether that many rows are decoded by products and the kernels between them."""
    return MANY_ROWS <= rows <= MOST_ROWS and _can_attend(device, dtype, d_kv)


def _can_attend(device: torch.device, dtype: torch.dtype, d_kv: int) -> bool:
    return dtype in DTYPES and d_kv & (d_kv - 1) == 0 and d_kv <= 256 and can_launch(device)


def _begins_early(x: Tensor) -> bool:
    """Whether kernels begin before the one before them has ended, on Hopper and later; x: [rows, …].

    One row's step takes 0.26 ms instead of 0.29 then, one of 64 rows 0.79 instead of 0.83. By the kernels of few
    rows it was slower: 1.03 instead of 0.88 for 8 rows.
    """
    gains = len(x) == 1 or len(x) >= MANY_ROWS
    return gains and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def linear(
    x: Tensor | Parts,
    weight: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear_reference`, rounded to the weight's dtype or, where there is one, the residual's.

    x: [rows, k], or what `attend_to_memory` gave; weight: [n, k].
    """
    from altup.kernels.decoding.maps import launch

    rows = x if isinstance(x, Tensor) else x.mixed[0]
    return launch(x, weight, norm, eps, gated, residual, _begins_early(rows))[0]


def linear_and_update(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    state: tuple[Tensor, ...],
    P: Tensor,
    g: Tensor,
    active: int,
) -> tuple[Tensor, ...]:
    """A layer's last map and addition of one row, and AltUp's update of K blocks with it, `altup_update`."""
    from altup.kernels.decoding.maps import Update, launch

    update = Update(state, P, g, active)
    return launch(x, weight, None, 0.0, False, residual, _begins_early(x), update=update)[0]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x·weightᵀ as parts that are to be added, [parts, rows, n]; x: [rows, k], weight: [n, k]."""
    from altup.kernels.decoding import many_rows

    return many_rows.product(x, weight, _begins_early(x))


def gate(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """gelu(y₁…n) ⊙ yₙ₊₁…₂ₙ of y = Σ parts, [parts, rows, 2n] → [rows, n] in `dtype`."""
    from altup.kernels.decoding import many_rows

    return many_rows.gate(parts, dtype, _begins_early(parts[0]))


def add_and_norm(
    x: Tensor, parts: Tensor | None, norm: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + Σ parts, and its norm in `dtype`; x: [rows, n], parts: [parts, rows, n]."""
    from altup.kernels.decoding import many_rows

    (out,), normed = many_rows.add(x, parts, norm, eps, dtype, _begins_early(x))
    return out, normed  # type: ignore[return-value]


def update_and_norm(
    x: Tensor,
    parts: Tensor,
    state: tuple[Tensor, ...],
    P: Tensor,
    g: Tensor,
    active: int,
    *,
    following: int,
    norm: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """AltUp's update of K blocks [rows, n] with x + Σ parts, `altup_update`, and the norm of block `following`."""
    from altup.kernels.decoding import many_rows
    from altup.kernels.decoding.maps import Update

    update = Update(state, P, g, active)
    return many_rows.add(x, parts, norm, eps, dtype, _begins_early(x), update, following)


def attend_to_cache(qkv: Tensor, keys: Tensor, values: Tensor, place: Tensor, bias: Tensor) -> Tensor:
    """Put the new keys and values to their place, and attend to all up to it.

    qkv: [rows, 3·heads·d], or parts of it; keys, values: [rows, heads, places, d]; place: [rows], the number of
    the new token; bias: [heads, places], float32, by how many tokens a key lies back → [rows, heads·d].
    """
    from altup.kernels.decoding.attention import over_cache

    return over_cache(qkv, keys, values, place, bias, _begins_early(keys))


def attend_to_memory(q: Tensor, keys: Tensor, values: Tensor, added: Tensor | None = None) -> Tensor | Parts:
    """`attend_reference`; of one row perhaps parts of it, which `linear` joins.

    q: [rows, heads·d], or parts of it; keys, values: [rows, heads, tokens, d]; added to scores: [rows, tokens].
    """
    from altup.kernels.decoding.attention import over_memory

    return over_memory(q, keys, values, added, _begins_early(keys))


def choose(
    hidden: Tensor,
    head: Tensor,
    norm: Tensor | None,
    eps: float,
    *,
    tokens: Tensor,
    latest: Tensor,
    place: Tensor,
    ended: Tensor,
    eos: Tensor | None,
    pad: int,
) -> None:
    """The token with the largest logit, norm(hidden)·headᵀ or hidden·headᵀ, goes to `latest` [rows, 1] and behind
    `place` [rows] into `tokens` [rows, limit], `pad` where a row has `ended` [rows]; `place` moves on, and a token
    of `eos` ends a row."""
    from altup.kernels.decoding import choice
    from altup.kernels.decoding.maps import launch

    early = _begins_early(hidden)
    tops, found = launch(hidden, head, norm, eps, False, None, early, chooses=True)
    choice.choose(tops, found, tokens, latest, place, ended, eos, pad, early)  # type: ignore[arg-type]
