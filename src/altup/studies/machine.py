"""What results were obtained on: the device and the versions, as people read them."""

from __future__ import annotations

import platform
import time
from pathlib import Path


def processor() -> str:
    """The name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware() -> str:
    """The GPU that a run would use, or the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def now() -> str:
    """When a result was obtained, to the second: of two on one day the newer counts."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def versions_text() -> str:
    from altup.training.model_card import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items() if name != "GPU")
