"""What the Triton kernels of both updates share: how they are cut."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """How a kernel is cut: each thread holds `vectors` times 16 bytes of every array."""

    warps: int
    vectors: int
    programs_per_sm: int = 0  # for kernels whose programs walk through the arrays: how many do
    stages: int = 1  # and in how many iterations' loads are in flight at once


def multiprocessors(device: torch.device) -> int:
    """One where Triton's interpreter stands in for a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
