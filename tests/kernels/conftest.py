from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import DEVICE


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(5, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
