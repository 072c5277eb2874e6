"""Clocks: device events on a GPU, the host's clock on a CPU; and taking turns.

What is compared takes turns, a burst each, on a machine that may also do other things: what slows the machine down
for a while slows all of them down.
"""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from altup.bench.problem import Work

# The GPU is kept busy before a burst for longer than the host takes to launch it: its own time is measured.
HEAD_START = 1.5
CYCLES_PER_S = 2e9  # at most; a slower clock gives a longer head start
BURST_MS = 200.0
MOST_IN_BURST = 20
LONG_MS = 2000.0


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


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios in each round, and bounds of its 95 % interval: by order statistics, whatever the
    distribution. Fewer than six rounds cannot say as much; their bounds are the extremes."""

    p50: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """`above` and `below` are times in the same rounds."""
        each = sorted(a / b for a, b in zip(above, below, strict=True))
        n, outside = len(each), 0
        while sum(math.comb(n, k) for k in range(outside + 1)) <= 0.025 * 2**n:
            outside += 1
        outside = max(0, outside - 1)
        return cls(statistics.median(each), each[outside], each[n - 1 - outside])


def take_turns(rivals: Mapping[str, object], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name) of whose turn it is: everyone once a round, and another one begins each.

    Who is taken out of `rivals` has no further rounds.
    """
    for number in range(rounds):
        names = list(rivals)
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            yield number, name


def time_in_turns(
    works: Mapping[str, Work], device: torch.device, rounds: int, burst: int
) -> dict[str, list[float]]:
    """Milliseconds of one repetition of each work in every round, after a repetition that does not count."""
    stopwatches = {name: Stopwatch(work, device, burst_size=1) for name, work in works.items()}
    for stopwatch in stopwatches.values():
        stopwatch.burst()
        stopwatch.forget()
        stopwatch.burst_size = burst
    for _, name in take_turns(stopwatches, rounds):
        stopwatches[name].burst()
    return {name: stopwatch.rounds[works[name].whole] for name, stopwatch in stopwatches.items()}


class PeakMemory:
    """The most bytes allocated on a device from now on, beside those that are; a CPU does not count them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before = device, 0
        if device.type == "cuda":
            gc.collect()
            synchronize(device)
            self._before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int | None:
        if self.device.type != "cuda":
            return None
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._before


class Stopwatch:
    """Milliseconds of each repetition of a work (`samples`), and the middle one of each burst (`rounds`): in
    `forward`, `backward` and `both`, or in its only mode. `together`: a burst is timed as one, by the host.

    `warm_up` sets the number of repetitions of a burst, unless it is given.
    """

    def __init__(self, work: Work, device: torch.device, burst_size: int = 1, together: bool = False) -> None:
        self.work, self.device, self.burst_size, self.head_start = work, device, burst_size, 0
        self.together = together or work.together
        self.forget()
        self._count = 0
        self._peak: int | None = None
        self._reserved = 0
        self.is_long = False  # whether the last repetition of the warm-up is the first burst

    def forget(self) -> None:
        """What was timed."""
        self.samples: dict[str, list[float]] = {}
        self.rounds: dict[str, list[float]] = {}

    def start_up(self) -> float:
        """Seconds of the first repetition: what compiling and loading cost."""
        if self.work.records:
            self._reserved = reserved_bytes(self.device)
        begun = time.perf_counter()
        self._repeat()
        synchronize(self.device)
        return time.perf_counter() - begun

    def warm_up(self, repetitions: int = 2) -> None:
        """Also finds how many repetitions make a burst, how long the host takes to launch them, and the peak."""
        for _ in range(repetitions):
            self._repeat()
        recorded = reserved_bytes(self.device) - self._reserved if self.work.records else 0
        memory = PeakMemory(self.device)
        synchronize(self.device)
        begun = time.perf_counter()
        self._repeat()
        launched = time.perf_counter() - begun
        synchronize(self.device)
        once = max(1e-3, 1000 * (time.perf_counter() - begun))
        self.burst_size = int(min(MOST_IN_BURST, max(1, BURST_MS // once)))
        self.head_start = int(HEAD_START * CYCLES_PER_S * launched * self.burst_size)
        peak = memory.read()
        self._peak = None if peak is None else peak + recorded
        self.is_long = once > LONG_MS and self.work.on_host and self.work.backward is None
        if self.is_long:
            self._keep({self.work.mode: [once]})

    def refill(self) -> None:
        """A repetition that does not count, after memory was freed."""
        self._repeat()
        synchronize(self.device)

    def burst(self) -> None:
        """Several repetitions, one after the other."""
        if self.together:
            self._keep({self.work.whole: [self._burst_as_one()]})
            return
        by_events = self.device.type == "cuda" and not self.work.on_host
        forward, backward = zip(*(self._burst_by_events() if by_events else self._burst_by_clock()), strict=True)
        if self.work.backward is None:
            self._keep({self.work.mode: forward})
        else:
            both = [a + b for a, b in zip(forward, backward, strict=True)]
            self._keep({"forward": forward, "backward": backward, "both": both})

    def _keep(self, times: Mapping[str, Sequence[float]]) -> None:
        for mode, values in times.items():
            self.samples.setdefault(mode, []).extend(values)
            self.rounds.setdefault(mode, []).append(statistics.median(values))

    def spreads(self) -> dict[str, Spread]:
        return {mode: Spread.of(values) for mode, values in self.samples.items()}

    def peak_bytes(self) -> int | None:
        """The most memory that a repetition needs, weights included; None on a CPU, which does not count it."""
        if self.device.type != "cuda":
            return None
        if self.work.unrecorded is not None:
            memory = PeakMemory(self.device)
            self.work.unrecorded()
            self._peak = memory.read()
        return (self._peak or 0) + self.work.held

    def clock_and_power(self) -> dict[str, float]:
        """The GPU's clock in MHz and its power in W while it repeats the work; nothing where it is not known."""
        if self.device.type != "cuda":
            return {}
        torch.cuda._sleep(self.head_start)
        for _ in range(self.burst_size):
            self._repeat()
        asked = "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"
        index = str(self.device.index or torch.cuda.current_device())
        try:
            answer = subprocess.run(
                ["nvidia-smi", *asked, f"--id={index}"], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            return dict(zip(("MHz", "W"), map(float, answer.split(",")), strict=True))
        except (OSError, ValueError, subprocess.SubprocessError):
            return {}
        finally:
            synchronize(self.device)

    def _repeat(self) -> None:
        out = self.work.forward(self._count)
        if self.work.backward is not None:
            self.work.backward(out)
        self._count += 1

    def _burst_as_one(self) -> float:
        """The mean of the repetitions: the host may run ahead of the device, as it does in training."""
        with self.work.around():
            synchronize(self.device)
            begun = time.perf_counter()
            for _ in range(self.burst_size):
                self._repeat()
            synchronize(self.device)
            return 1000 * (time.perf_counter() - begun) / self.burst_size

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


def reserved_bytes(device: torch.device) -> int:
    """What PyTorch has taken from a GPU and cannot give back: tensors, and the memory of graphs."""
    if device.type != "cuda":
        return 0
    gc.collect()
    synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
