"""Settings that every test shares."""

from __future__ import annotations

import os

# Read before any test imports transformers: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real text and the paper's tables, beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder {SHARED}")
    return SHARED
