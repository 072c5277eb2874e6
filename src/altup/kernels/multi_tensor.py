"""Many tensors for one kernel: they stay where they are, and the kernel is given a list of their addresses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COPIED = 1024  # numbers that a program copies


class TensorList(NamedTuple):
    """The addresses of tensors of one dtype, device and number of elements; `like` is one of them."""

    addresses: Tensor
    like: Tensor


def tensor_list(tensors: Sequence[Tensor]) -> TensorList:
    """`tensors` must be readable (see `can_read`) and outlive the kernels that read them."""
    table = _table(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        _RECORDED.append(table)
    return TensorList(table, tensors[0])


_RECORDED: list[Tensor] = []  # tables that CUDA graphs read, which must stay where they are


@functools.lru_cache(maxsize=1024)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached, because most tensors stay where they are, and none can be made while a graph is recorded."""
    table = torch.tensor(addresses)
    if device.type == "cuda":  # pinned, so that the host does not wait for the copy
        table = table.pin_memory().to(device, non_blocking=True)
    return table


def can_read(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can read these: not empty, contiguous, on one device, placed as PyTorch's allocators do."""
    device = tensors[0].device
    return all(t.numel() and t.is_contiguous() and t.device == device and t.data_ptr() % 16 == 0 for t in tensors)


def step_scalars(lr: Tensor | float, skip: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """`lr` and `skip` of an optimizer's step, where its kernels read them."""
    if not isinstance(lr, Tensor) or lr.device != device:
        lr = torch.full((), float(lr), device=device)
    return lr, torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip


@triton.jit
def pointer(addresses, like, n):
    """To the first element of the n-th tensor of a list."""
    return tl.multiple_of(tl.load(addresses + n).to(like.dtype), 16)


@triton.jit
def copy_kernel(out, parts, part_like, numel, BLOCK: tl.constexpr):
    n = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pointer(parts, part_like, n) + i, mask=i < numel)
    tl.store(out + n.to(tl.int64) * numel + i, x.to(out.dtype.element_ty), mask=i < numel)


def copy_together(out: Tensor, parts: Sequence[Tensor]) -> None:
    """out ← the parts, readable ones of one shape, one after the other, in out's dtype."""
    numel = parts[0].numel()
    with torch.cuda.device_of(out):
        copy_kernel[triton.cdiv(numel, COPIED), len(parts)](out, *tensor_list(parts), numel, BLOCK=COPIED)
