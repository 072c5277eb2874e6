"""What decoding needs whose steps are recorded as CUDA graphs: when it may be done, and under what settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from altup.nn.linear import is_unhooked

CACHE_SHARE = 0.25  # of the free memory, for a cache that has room for the longest text allowed


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """Without cuDNN's attention, which PyTorch prefers on Hopper: with masked keys it does not repeat itself to
    the last bit."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


@contextmanager
def eager_steps(device: torch.device) -> Iterator[None]:
    """A model compiled for training would be compiled again."""
    with torch.compiler.set_stance("force_eager"), uncached_autocast(device):
        yield


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is, without its store of weights, which does not outlive a graph."""
    return torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )


def is_hooked(model: Any) -> bool:
    """Whether someone waits for each call of a module, as accelerate does where a model is spread over devices: a
    replayed step calls none."""
    return not all(map(is_unhooked, model.modules()))


def fits_memory(numbers: int, dtype: torch.dtype, device: torch.device, free: int) -> bool:
    """Whether a cache of so many numbers, in the type that a model of `dtype` computes in, is a small part of
    `free` bytes."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return numbers * dtype.itemsize <= CACHE_SHARE * free


def free_memory(device: torch.device) -> int:
    """Free bytes of a CUDA device, including those that PyTorch holds without using them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
