"""Work recorded as a CUDA graph, which a GPU replays without waiting for the host to launch its parts."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from altup.core.errors import is_out_of_memory, warn_once

Made = TypeVar("Made")
WARM_UPS = 2  # runs before a recording, in which code is compiled and libraries choose their algorithms


@dataclass(frozen=True)
class Replay:
    """`run` as a graph: every call does its work again, in the same memory, and gives the same `result`.

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
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
    finally:  # what was launched before an error still writes
        torch.cuda.current_stream(device).wait_stream(stream)


def record(run: Callable[[], Any], pool: Any = None) -> Replay:
    """`run`, recorded but not run yet; `pool` is the memory of graphs that never run at the same time."""
    graph = torch.cuda.CUDAGraph()
    # Thread-local, because meanwhile another thread may prepare the next batch.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return Replay(graph, run, result)


def can_record(device: torch.device) -> bool:
    """Whether there are graphs for `device` at all."""
    return device.type == "cuda"


_launched: weakref.WeakSet[Any] = weakref.WeakSet()  # owners of work that no graph could hold


def try_recording(make: Callable[[], Made], device: torch.device, warning: str, owner: Any = None) -> Made | None:
    """What `make` records; None where that fails, and the same work is to be launched. `warning` is given, once.

    It fails where memory lacks, where a driver is too old, or where the work does what no graph may hold. But for
    lack of memory, which may be there the next time, nothing more is recorded for `owner`. An error that has
    nothing to do with recording comes again when the work is launched, and reaches the user then.
    """
    if owner is not None and owner in _launched:
        return None
    stream = torch.cuda.current_stream(device) if can_record(device) else None
    handled = sys.exc_info()[1]
    try:
        return make()
    except RuntimeError as error:
        if stream is not None:
            torch.cuda.set_stream(stream)  # a recording that fails may leave its own
        torch.clear_autocast_cache()  # or copies of weights that were recorded, but never made
        cause = _first(error, handled)
        if owner is not None and not is_out_of_memory(cause):
            _launched.add(owner)
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].split(". ")[0][:200]
        warn_once(f"{warning}: {reason}")
        return None


def _first(error: BaseException, handled: BaseException | None) -> BaseException:
    """Of errors that followed from each other: the end of a recording fails because a part of it has failed.

    `handled` is the caller's own, as where a batch was too large and a smaller one is tried: it explains nothing.
    """
    while isinstance(error.__context__, RuntimeError) and error.__context__ is not handled:
        error = error.__context__
    return error
