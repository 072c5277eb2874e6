"""Looking rows up as a custom operator of PyTorch, with its gradient registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.launch import on_its_device


@library.custom_op(
    "altup::embedding", mutates_args=(), schema="(Tensor ids, Tensor table, ScalarType dtype) -> Tensor"
)
@on_its_device
def look_up(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """ids: [...], contiguous, table: [words, d] → [..., d] in `dtype`; NaN where there is no such word."""
    from altup.kernels.embedding.triton import look_up as by_kernel

    rows = table.new_empty(*ids.shape, table.shape[1], dtype=dtype)
    by_kernel(rows.view(-1, table.shape[1]), ids, table.contiguous())
    return rows


@library.custom_op(
    "altup::embedding_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor ids, int words, ScalarType dtype) -> Tensor",
)
@on_its_device
def look_up_backward(grad: Tensor, ids: Tensor, words: int, dtype: torch.dtype) -> Tensor:
    """The table's gradient [words, d] in `dtype`: the rows of `grad` [..., d] added up by word.

    Sorted by word, the places of a word stand side by side, in their order: the sums never vary. A GPU sorts by 8
    bits at a time, so ids are as short as they can be.
    """
    from altup.kernels.embedding.triton import add_rows

    table = grad.new_empty(words, grad.shape[-1], dtype=dtype)
    short = torch.int16 if words < 2**15 else torch.int32
    in_order, places = torch.sort(ids.flatten().to(short), stable=True)
    starts = torch.searchsorted(in_order, torch.arange(words + 1, device=ids.device, dtype=short), out_int32=True)
    add_rows(table, grad.contiguous().view(-1, grad.shape[-1]), in_order, places, starts)
    return table


@look_up.register_fake
def _(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1], dtype=dtype)


@look_up_backward.register_fake
def _(grad: Tensor, ids: Tensor, words: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(words, grad.shape[-1], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, table, _ = inputs
    ctx.words, ctx.dtype = len(table), table.dtype
    ctx.save_for_backward(ids)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, look_up_backward(grad, *ctx.saved_tensors, ctx.words, ctx.dtype), None


look_up.register_autograd(_differentiate, setup_context=_save)
