"""Dropout's mask as a custom operator of PyTorch, opaque to `torch.compile`.

It is given a shape and not what is dropped, so that compiled code need not write that out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device


@library.custom_op("altup::keep_mask", mutates_args=())
@on_its_device
def keep_mask_op(seed: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Which elements of a tensor are kept under `seed` [1], int64: bool, contiguous."""
    from altup.kernels.dropout.triton import keep_mask

    mask = _empty(seed, shape)
    keep_mask(mask, seed, p)
    return mask


@keep_mask_op.register_fake
def _empty(seed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=seed.device)
