"""Clocks: device events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from altup.bench.problem import Work

# The GPU is kept busy before a burst for longer than the host takes to launch it: its own time is measured.
HEAD_START = 1.5
CYCLES_PER_S = 2e9  # at most; a slower clock gives a longer head start
BURST_MS = 200.0
MOST_IN_BURST = 20


@dataclass(frozen=True)
class Spread:
    """The middle of many repetitions, and where the fastest and slowest fifth begin."""

    p20: float
    p50: float
    p80: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        fifths = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else [values[0]] * 4
        return cls(fifths[0], statistics.median(values), fifths[3], len(values))


class Stopwatch:
    """Milliseconds of each repetition of a work: in `forward`, `backward` and `both`, or in its only mode."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.device = work, device
        self.samples: dict[str, list[float]] = {}
        self._count = 0

    def start_up(self) -> float:
        """Seconds of the first repetition: what compiling and loading cost."""
        begun = time.perf_counter()
        self._repeat()
        synchronize(self.device)
        return time.perf_counter() - begun

    def warm_up(self, repetitions: int = 2) -> None:
        """Also finds how many repetitions make a burst, and how long the host takes to launch them."""
        for _ in range(repetitions):
            self._repeat()
        synchronize(self.device)
        begun = time.perf_counter()
        self._repeat()
        launched = time.perf_counter() - begun
        synchronize(self.device)
        once = max(1e-3, 1000 * (time.perf_counter() - begun))
        self.burst_size = int(min(MOST_IN_BURST, max(1, BURST_MS // once)))
        self.head_start = int(HEAD_START * CYCLES_PER_S * launched * self.burst_size)

    def burst(self) -> None:
        """Several repetitions, one after the other."""
        by_events = self.device.type == "cuda" and not self.work.on_host
        times = self._burst_by_events() if by_events else self._burst_by_clock()
        for forward, backward in times:
            if self.work.backward is None:
                self.samples.setdefault(self.work.mode, []).append(forward)
            else:
                for mode, value in zip(
                    ("forward", "backward", "both"), (forward, backward, forward + backward), strict=True
                ):
                    self.samples.setdefault(mode, []).append(value)

    def spreads(self) -> dict[str, Spread]:
        return {mode: Spread.of(values) for mode, values in self.samples.items()}

    def peak_bytes(self) -> int | None:
        """The most memory that a repetition needs, weights included; None on a CPU, which does not count it."""
        if self.device.type != "cuda":
            return None
        gc.collect()
        synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        if self.work.unrecorded is not None:
            self.work.unrecorded()
        else:
            self._repeat()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before + self.work.held

    def _repeat(self) -> None:
        out = self.work.forward(self._count)
        if self.work.backward is not None:
            self.work.backward(out)
        self._count += 1

    def _burst_by_events(self) -> list[tuple[float, float]]:
        torch.cuda._sleep(self.head_start)
        marks = []
        for _ in range(self.burst_size):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            events[0].record()
            out = self.work.forward(self._count)
            events[1].record()
            if self.work.backward is not None:
                self.work.backward(out)
            events[2].record()
            del out
            self._count += 1
            marks.append(events)
        torch.cuda.synchronize(self.device)
        return [(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in marks]

    def _burst_by_clock(self) -> list[tuple[float, float]]:
        times = []
        for _ in range(self.burst_size):
            begun = time.perf_counter()
            out = self.work.forward(self._count)
            synchronize(self.device)
            middle = time.perf_counter()
            if self.work.backward is not None:
                self.work.backward(out)
                synchronize(self.device)
            end = time.perf_counter()
            self._count += 1
            times.append((1000 * (middle - begun), 1000 * (end - middle)))
        return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
