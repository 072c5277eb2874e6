"""Randomness that a resumed run repeats: every forward pass seeds itself from where it stands."""

from __future__ import annotations

import hashlib
import os

import torch


def seed_forward(seed: int, step: int, micro: int, rank: int) -> None:
    """Make dropout and expert jitter a pure function of (seed, step, micro-batch, process)."""
    key = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


def configure(deterministic: bool, precision: str) -> None:
    """Global switches: TF32 for what stays float32 beside bf16, and PyTorch's deterministic algorithms."""
    torch.set_float32_matmul_precision("high" if precision == "bf16" else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
