from __future__ import annotations

import pytest
import torch

from tests.kernels.hopper import Hopper
from tests.kernels.interpreter import DEVICE


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(5, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper(tmp_path, monkeypatch) -> Hopper:
    """Triton's compiler for Hopper, with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return Hopper(tmp_path)
