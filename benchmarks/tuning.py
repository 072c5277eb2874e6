"""What the scripts that tune kernels share: where they run, a clock, and a distance."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    sys.path.append(str(Path(__file__).parent.parent))
    import tests.kernels.interpreter  # noqa: F401  which repairs Triton's interpreter for newer numpy


def milliseconds(run: Callable[[], Any], seconds: float = 0.3) -> str:
    """Median over runs between events; the inputs are far larger than the cache."""
    if INTERPRETED:
        run()
        return "not timed"
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, begun = [], time.perf_counter()
    while time.perf_counter() - begun < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return f"{statistics.median(times):.3f} ms"


def distance(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm())
