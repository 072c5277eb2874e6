"""Launching Triton kernels: where they can run, the launch configuration, and contiguous arrays.

Everywhere else the plain expressions do the work.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

IMPLEMENTATIONS = ("auto", "plain", "triton")  # values of the argument `implementation`
FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of the tensors that kernels read


@torch.compiler.assume_constant_result
def runs_triton(device: torch.device) -> bool:
    """Whether `device` is a CUDA GPU that Triton supports (Ampere or later), and Triton is installed."""
    return _runs_triton(device)


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@torch.compiler.assume_constant_result
def interprets_triton() -> bool:
    """Whether Triton's interpreter stands in for a GPU: slow, and only for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(device: torch.device) -> bool:
    """Whether kernels can be asked for by name: on a GPU, or where the interpreter stands in for it."""
    return runs_triton(device) or interprets_triton()


def runs_fused(weight: Tensor, *others: Tensor) -> bool:
    """Whether an optimizer's kernels can update a tensor; `others` are all else that they read and write."""
    if weight.dtype not in FUSED_DTYPES or not can_launch(weight.device):
        return False
    from altup.kernels.multi_tensor import can_read

    return can_read([weight, *others])


class Config(NamedTuple):
    """A launch configuration: each thread holds `vectors` times 16 bytes of every array."""

    warps: int
    vectors: int
    programs_per_sm: int = 0  # for kernels whose programs walk through the arrays: how many do
    stages: int = 1  # and in how many iterations' loads are in flight at once


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """One where Triton's interpreter stands in for a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def ceil_div(a: int, b: int) -> int:
    """`triton.cdiv`, which takes the host some microseconds."""
    return -(-a // b)


@functools.cache
def power_of_two(number: int) -> int:
    """The next one, as `triton.next_power_of_2` has it."""
    return 1 << (number - 1).bit_length()


def flat(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Contiguous tensors, as the kernels need them; None stays None."""
    return tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])


def vector_width(*tensors: Tensor | None) -> int:
    """Elements in a 16-byte vector of the widest dtype."""
    return 16 // max(tensor.element_size() for tensor in tensors if tensor is not None)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Entering a context costs the host, so only where there is something to leave."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()
