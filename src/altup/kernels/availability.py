"""Where the Triton kernels can run; everywhere else the plain expressions do the work."""

from __future__ import annotations

import functools
import importlib.util

import torch


@torch.compiler.assume_constant_result
@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether `device` is a CUDA GPU that Triton supports (Ampere or later), and Triton is installed."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.cache
def interprets_triton() -> bool:
    """Whether Triton's interpreter stands in for a GPU (TRITON_INTERPRET=1): slow, and only for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
