"""Settings of PyTorch that tests of Gemma 3n share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact_products():
    """Float32 means float32 here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
