"""Where the Triton kernels can run; everywhere else the plain expressions do the work."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Operator = TypeVar("Operator", bound=Callable[..., Any])

FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def on_its_device(operator: Operator) -> Operator:
    """Make the device of the operator's first tensor the current one, for that is where Triton launches."""

    @functools.wraps(operator)
    def run(*given: Any) -> Any:
        first = given[0] if isinstance(given[0], Tensor) else given[0][0]
        with torch.cuda.device_of(first):
            return operator(*given)

    run.__signature__ = inspect.signature(operator, eval_str=True)  # type: ignore[attr-defined]  # for a schema
    return run  # type: ignore[return-value]
