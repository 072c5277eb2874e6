"""A decoder's step for one new token of a few rows, as few kernels: it is bound by their number.

A layer is eight: norm with queries, keys and values; attention over the cache; its output map with the addition;
norm with the queries of cross-attention; that; its output map; norm with both maps into the feed-forward and its
gate; the map out of it, with AltUp's update. Definitions: `reference.py`. Sums run in float32. There are no
gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.kernels.decoding.reference import attend_reference, linear_reference
from altup.kernels.geglu import geglu
from altup.kernels.launch import can_launch

if TYPE_CHECKING:
    from altup.kernels.decoding.attention import Parts

__all__ = [
    "attend_reference",
    "attend_to_cache",
    "attend_to_memory",
    "can_decode",
    "choose",
    "linear",
    "linear_and_update",
    "linear_reference",
]

# Of a model with one block: with 64 rows a step of plain code takes 1.20 ms on an H200, one of these kernels 1.41.
# AltUp's update in the last kernel was seen to be right there with one row.
MOST_ROWS, MOST_ROWS_OF_BLOCKS = 32, 1
DTYPES = (torch.bfloat16, torch.float32)  # in float16 the rows before their norm could be too large
# Up to so many rows kernels begin before the one before them has ended, on Hopper and later. One row's step took
# 0.26 ms instead of 0.29 on an H200 (0.24 since the cache is fetched early); with more rows the gain is not known.
EARLY_ROWS = 1
# From so many rows on, maps are cuBLAS's, with norm and gate as kernels beside them. Off: no GPU has timed it.
CUBLAS_ROWS = 2**31


def can_decode(device: torch.device, dtype: torch.dtype, rows: int, d_kv: int, num_blocks: int = 1) -> bool:
    """Whether the kernels below take so many rows of a model that computes in `dtype`."""
    power_of_2 = d_kv & (d_kv - 1) == 0
    most = MOST_ROWS if num_blocks == 1 else MOST_ROWS_OF_BLOCKS
    return rows <= most and dtype in DTYPES and power_of_2 and d_kv <= 256 and can_launch(device)


def _begins_early(x: Tensor) -> bool:
    """x: [rows, …]."""
    return len(x) <= EARLY_ROWS and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


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

    if isinstance(x, Tensor) and len(x) >= CUBLAS_ROWS and _are_alike(x, weight, norm, residual):
        return _by_cublas(x, weight, norm, eps, gated, residual)
    rows = x if isinstance(x, Tensor) else x.mixed[0]
    return launch(x, weight, norm, eps, gated, residual, _begins_early(rows))[0]


def _are_alike(*tensors: Tensor | None) -> bool:
    return len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def _by_cublas(
    x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, gated: bool, residual: Tensor | None
) -> Tensor:
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, eps)
    if residual is not None and not gated:
        return torch.addmm(residual, x, weight.t())
    y = F.linear(x, weight)
    y = geglu(y, training=False) if gated else y
    return y if residual is None else residual + y


def linear_and_update(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    state: tuple[Tensor, ...],
    P: Tensor,
    g: Tensor,
    active: int,
) -> tuple[Tensor, ...]:
    """A layer's last map and addition, and AltUp's update of K blocks [rows, n] with it, `altup_update`."""
    from altup.kernels.decoding.maps import Update, launch

    update = Update(state, P, g, active)
    return launch(x, weight, None, 0.0, False, residual, _begins_early(x), update=update)[0]


def attend_to_cache(qkv: Tensor, keys: Tensor, values: Tensor, place: Tensor, bias: Tensor) -> Tensor:
    """Put the new keys and values to their place, and attend to all up to it.

    qkv: [rows, 3·heads·d]; keys, values: [rows, heads, places, d]; place: [rows], the number of the new token;
    bias: [heads, places], float32, by how many tokens a key lies back → [rows, heads·d].
    """
    from altup.kernels.decoding.attention import over_cache

    return over_cache(qkv, keys, values, place, bias, _begins_early(qkv))


def attend_to_memory(q: Tensor, keys: Tensor, values: Tensor, added: Tensor | None = None) -> Tensor | Parts:
    """`attend_reference`; of one row perhaps parts of it, which `linear` joins.

    q: [rows, heads·d]; keys, values: [rows, heads, tokens, d]; added to scores: [rows, tokens].
    """
    from altup.kernels.decoding.attention import over_memory

    return over_memory(q, keys, values, added, _begins_early(q))


def choose(
    hidden: Tensor,
    head: Tensor,
    norm: Tensor,
    eps: float,
    *,
    tokens: Tensor,
    latest: Tensor,
    place: Tensor,
    ended: Tensor,
    eos: Tensor | None,
    pad: int,
) -> None:
    """The token with the largest logit, norm(hidden)·headᵀ, goes to `latest` [rows, 1] and behind `place` [rows]
    into `tokens` [rows, limit], `pad` where a row has `ended` [rows]; `place` moves on, and a token of `eos` ends
    a row."""
    from altup.kernels.decoding import choice
    from altup.kernels.decoding.maps import launch

    early = _begins_early(hidden)
    tops, found = launch(hidden, head, norm, eps, False, None, early, chooses=True)
    choice.choose(tops, found, tokens, latest, place, ended, eos, pad, early)  # type: ignore[arg-type]
