"""Randomness that a resumed run repeats: every forward pass seeds itself from where it stands."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

import torch

from altup.core.cpu import ensure_bf16


def seed_forward(seed: int, step: int, micro: int, rank: int) -> None:
    """Make dropout and expert jitter a pure function of (seed, step, micro-batch, process)."""
    key = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


@contextlib.contextmanager
def numerics(deterministic: bool, low_precision: bool) -> Iterator[None]:
    """TF32 for what stays float32 beside bf16, and PyTorch's deterministic algorithms; put back at the end."""
    if low_precision:
        ensure_bf16("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if low_precision else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
