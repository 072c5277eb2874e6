"""Optimizers whose step can be skipped on the device, and their state as tensors by parameter name."""

from __future__ import annotations

from altup.training.optimizers.build import OPTIMIZERS, blocks_of, build_optimizer, parts_of, set_rate
from altup.training.optimizers.state import load_state_tensors, named_state, state_tensors

__all__ = [
    "OPTIMIZERS",
    "blocks_of",
    "build_optimizer",
    "load_state_tensors",
    "named_state",
    "parts_of",
    "set_rate",
    "state_tensors",
]
