"""Settings that every test shares."""

from __future__ import annotations

import os

# Read before any test imports transformers: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, beside the other worker's

import contextlib
import gc
from pathlib import Path

import pytest

from altup.core.hardware import make_bf16_safe

with contextlib.suppress(ImportError):  # on a machine that only runs the tests of its GPU
    from hypothesis import HealthCheck, settings

    # The same examples every time, and no limit of time for one, which a busy machine would exceed.
    settings.register_profile(
        "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")

SHARED = Path(__file__).resolve().parents[2] / "shared"
_BF16 = pytest.StashKey[str | None]()


def pytest_configure(config: pytest.Config) -> None:
    """Once, for all processes of the tests: bf16 on the CPU must not crash them."""
    if not hasattr(config, "workerinput"):
        config.stash[_BF16] = make_bf16_safe()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is there by now stays: the collector need not walk through it in every test."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(_BF16, None)


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


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch):
    """A function that makes models of any dtype, on a CPU too, join products and passes as they do on a GPU."""

    def switch_on() -> None:
        for module in ("nn.linear", "models.layers", "models.stack"):
            monkeypatch.setattr(f"altup.{module}.fuses", lambda x: True)

    return switch_on
