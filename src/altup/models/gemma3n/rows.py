"""Rows of several lengths as one row of texts end to end: no padding is computed, and no mask is made.

A batch of padded rows, and rows packed with several texts (`position_ids` that begin again), both become one row
of all real tokens with the bounds of its texts, which attention takes as a list (`Segments`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.kernels.gemma3n import Segments


class Rows(NamedTuple):
    """How rows [batch, tokens, ...] lie in one row [1, kept tokens, ...]."""

    segments: Segments
    batch: int
    tokens: int
    kept: Tensor | None  # the tokens that are computed, counted over all rows; None: all of them

    def join(self, x: Tensor) -> Tensor:
        """[batch or 1, tokens, ...] → [1, kept, ...]."""
        x = x.expand(self.batch, *x.shape[1:]).flatten(0, 1)
        return (x if self.kept is None else x.index_select(0, self.kept)).unsqueeze(0)

    def split(self, x: Tensor) -> Tensor:
        """[1, kept, ...] → [batch, tokens, ...], with zeros for what was not kept."""
        x = x.squeeze(0)
        if self.kept is not None:
            x = x.new_zeros(self.batch * self.tokens, *x.shape[1:]).index_copy(0, self.kept.to(x.device), x)
        return x.unflatten(0, (self.batch, self.tokens))


def padded_rows(mask: Tensor) -> Rows | None:
    """From a mask [batch, tokens] that is 0 for padding; None where tokens are missing within a row, as a window
    counts those too.

    The token before a text that is padded on the left is kept: the first label is predicted there. As under a mask
    it sees nothing.
    """
    batch, tokens = mask.shape
    real = mask.bool()
    edges = real.diff(dim=1, prepend=real.new_zeros(batch, 1), append=real.new_zeros(batch, 1)).sum(1)
    before = torch.zeros_like(real)
    before[:, :-1] = real[:, 1:] & ~real[:, :-1]
    lengths = torch.stack((before.sum(1), real.sum(1)), dim=1).flatten()
    *counted, most_edges = torch.cat((lengths, edges.max()[None])).tolist()  # here the host waits for the GPU
    if most_edges > 2 or not sum(counted):
        return None
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum(lengths, 0, out=starts[1:])
    kept = torch.nonzero_static((real | before).flatten(), size=sum(counted)).squeeze(1)
    blind = before.flatten()[kept] if any(counted[::2]) else None
    return Rows(Segments(starts, max(counted), blind), batch, tokens, kept)


def packed_rows(position_ids: Tensor, batch: int) -> Rows | None:
    """From positions [batch or 1, tokens]: a text begins wherever they do not count on. None: a text is a row."""
    position_ids = position_ids.expand(batch, -1)
    tokens = position_ids.shape[1]
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
    begins[:, 0] = True
    starts = begins.flatten().nonzero().squeeze(1)
    if len(starts) == batch:
        return None
    ends = torch.tensor([batch * tokens], device=starts.device)
    starts = torch.cat((starts, ends))
    return Rows(Segments(starts.int(), int(starts.diff().max())), batch, tokens, None)


def as_one_row(mask: Any, position_ids: Tensor | None, x: Tensor) -> Rows | None:
    """How the rows of x [batch, tokens, ...] are laid end to end; None where they need no mask, or another one.

    As transformers reads them: positions count where there is no mask, and a mask of four dimensions stays.
    """
    batch, tokens = x.shape[:2]
    if mask is None:
        return None if position_ids is None or position_ids.ndim != 2 else packed_rows(position_ids, batch)
    if not isinstance(mask, Tensor) or mask.shape != (batch, tokens) or bool(mask.all()):
        return None
    return padded_rows(mask)
