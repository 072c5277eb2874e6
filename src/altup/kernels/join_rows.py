"""Matrices below one another, as an operator that `torch.compile` does not look into.

What it sees as a concatenation it would rather do twice, forward and backward, than keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import can_launch


@library.custom_op("altup::join_rows", mutates_args=(), schema="(Tensor[] parts, ScalarType dtype) -> Tensor")
def join_rows(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[rows, n] each → [all rows, n] in `dtype`."""
    if all(part.dtype == dtype for part in parts):
        return torch.cat(list(parts))
    out = _empty(parts, dtype)
    alike = len({(part.shape, part.dtype) for part in parts}) == 1
    if alike and can_launch(out.device):  # PyTorch's own takes six times as long for few small parts
        from altup.kernels.multi_tensor import can_read, copy_together

        if can_read(parts):
            copy_together(out, parts)
            return out
    torch._foreach_copy_(list(out.split([len(part) for part in parts])), list(parts))
    return out


@join_rows.register_fake
def _empty(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kinds = [(len(part), part.dtype) for part in inputs[0]]


def _split(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if len({dtype for _, dtype in ctx.kinds}) == 1:
        return list(grad.to(ctx.kinds[0][1]).split([rows for rows, _ in ctx.kinds])), None
    parts = grad.split([rows for rows, _ in ctx.kinds])
    return [part.to(dtype) for part, (_, dtype) in zip(parts, ctx.kinds, strict=True)], None


join_rows.register_autograd(_split, setup_context=_remember)
