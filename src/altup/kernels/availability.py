"""Where the Triton kernels can run; everywhere else the plain expressions do the work."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

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
