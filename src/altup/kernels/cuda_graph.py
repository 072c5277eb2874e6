"""Work recorded as a CUDA graph, which a GPU replays without waiting for the host to launch its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARM_UPS = 2  # runs before a recording, in which code is compiled and libraries choose their algorithms


@dataclass(frozen=True)
class Replay:
    """`run` as a graph: every call does its work again, in the same places, and gives the same `result`.

    A graph does not keep alive what it reads; `run` is held for that.
    """

    graph: torch.cuda.CUDAGraph
    run: Callable[[], Any]
    result: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of all warm-ups: cuBLAS keeps memory for ever for each stream that multiplies matrices."""
    return torch.cuda.Stream(device)


def warm_up(run: Callable[[], Any], device: torch.device) -> None:
    """Run a few times beside the current stream, as a recording demands."""
    stream = _beside(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)


def record(run: Callable[[], Any], pool: Any = None) -> Replay:
    """`run`, recorded but not run yet; `pool` is the memory of graphs that never run at the same time."""
    graph = torch.cuda.CUDAGraph()
    # Thread-local, because meanwhile another thread may prepare the next batch.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return Replay(graph, run, result)
