"""What two runs must share to count as the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from altup.training.metrics import read_records
from altup.training.tensor_files import TensorFiles

# Fields that differ between two runs that computed the same.
TIMING_FIELDS = ("seconds", "steps_per_s", "seq_per_s", "tokens_per_s", "mfu")


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    kept = read_records(out / "metrics.jsonl")
    return [{n: v for n, v in record.items() if n not in TIMING_FIELDS} for record in kept]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return tensors(out / "final", "model")


def tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """From one file, or from those that several ranks wrote."""
    return {name: stored[...] for name, stored in TensorFiles(folder, stem).items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """Weights, optimizer and metrics agree to the last bit after `step` steps."""
    assert_same_bits(weights(one), weights(other))
    ours, theirs = (path / "checkpoints" / f"step-{step}" for path in (one, other))
    assert_same_bits(tensors(ours, "optimizer"), tensors(theirs, "optimizer"))
    assert records(one) == records(other)
