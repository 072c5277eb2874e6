"""Where gradients of parts of a tensor are written: each at its own offset in one tensor.

The keys and values of many layers are one product of an encoder's output. Their gradients come layer by layer, and
the product's backward pass wants them as one tensor. Written side by side they are one, without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class _Open(threading.local):
    """The tensor of gradients that parts are given out of: which tensor it belongs to, and which parts are out.

    Backward passes of several devices run in a thread each.
    """

    key: tuple[int, int] = (0, 0)
    base: Tensor | None = None
    given: frozenset[int] = frozenset()


_open = _Open()


def is_part(x: Tensor) -> bool:
    """Whether the rows of x [B, N, n, H, D], of N tokens, are parts of longer ones."""
    n, H, D = x.shape[2:]
    return x.stride(4) == 1 and x.stride(3) == D and x.stride(2) == H * D and x.stride(1) > n * H * D


def slot(x: Tensor) -> Tensor:
    """Memory for the gradient of x [B, N, n, H, D], in a tensor laid out like the one that x is a part of.

    A part that is asked for again begins a new tensor, as does another one's; the last one is not held on to.
    """
    if type(x) is not Tensor or not is_part(x):  # one that a compiler traces has no memory
        return x.new_empty_strided(x.shape, x.stride()) if is_part(x) else x.new_empty(x.shape)
    storage = x.untyped_storage()
    key = (storage.data_ptr(), storage.nbytes())
    offset = int(x.storage_offset())
    if _open.key != key or _open.base is None or offset in _open.given:
        _open.key, _open.given = key, frozenset()
        _open.base = x.new_empty(storage.nbytes() // x.element_size())
    base, _open.given = _open.base, _open.given | {offset}
    if len(_open.given) * x.numel() >= base.numel():
        _open.base = None
    return base.as_strided(x.shape, x.stride(), offset)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts [B, N, d] side by side, [B, N, len(parts) · d]; without a copy where they lie so already."""
    first = parts[0]
    B, N, d = first.shape
    step = d * first.element_size()
    row = len(parts) * d
    lie = all(
        part.shape == first.shape
        and part.stride() == (N * row, row, 1)
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.data_ptr() == first.data_ptr() + number * step
        for number, part in enumerate(parts)
    )
    return first.as_strided((B, N, row), (N * row, row, 1)) if lie else torch.cat(list(parts), dim=-1)
