"""Runs cases: builds every provider of a problem, checks it, then times all of them in turns."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from altup.bench.cases import BenchConfig, problems
from altup.bench.problem import Problem, Provider, Setup, Timings
from altup.bench.profile import print_profile
from altup.bench.rows import DISAGREES, FAILED, OK, SKIPPED, BenchRow, Machine, Sheet
from altup.bench.timing import Ratio, Spread, Stopwatch, take_turns
from altup.core.errors import UserError

GIB = 2**30
WHOLE_STEPS = ("step", "gemma3n", "inference")  # cases long enough for the GPU's clock and power to be read
# The share of the time limit for building and checking; the rest is for timing.
BUILDING = 0.8
SLOW = 1.0  # seconds of a first repetition that need no further ones to warm up
# Compiled providers share source code: at the usual limits some would quietly run eagerly.
COMPILING = {
    "recompile_limit": 256,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,
}


@dataclass
class Runner:
    """`emit` receives every row as soon as it is known; `say` reports progress.

    `only` are patterns of provider names, all if empty, `where` sizes (`Problem.is_where`). `unchecked` compares
    nothing with its reference. `by_host` times whole bursts by the host's clock, `profile` reports what runs on
    the device. A provider that fails, disagrees or comes too late is reported and does not stop the others. `cold`
    measures the start of compiled providers alone, each compiled anew; otherwise one uses what others compiled
    before it. Of the time limit each of `cases`, in this order, has an equal share and what is unused so far.
    """

    setup: Setup
    emit: Callable[[BenchRow], None]
    say: Callable[[str], None] = lambda text: None
    only: Sequence[str] = ()
    rounds: int = 10
    time_limit: float = float("inf")
    cold: bool = False
    cases: Sequence[str] = ()
    where: Sequence[str] = ()
    unchecked: bool = False
    by_host: bool = False
    profile: bool = False
    _begun: float = field(default_factory=lambda: time.monotonic())

    def run(self, problems: Iterable[Problem]) -> None:
        with torch._dynamo.config.patch(COMPILING):
            for problem in problems:
                if not problem.is_where(self.where):
                    continue
                self.solve(problem)
                del problem
                self._free()
                if self._is_late():
                    self.say("time limit: nothing more is begun")
                    return

    def solve(self, problem: Problem) -> None:
        """One problem; what was timed is reported even if the user ends it early.

        Those that need not be compiled come first, and each is timed once as soon as it is ready: what takes long
        may be ended before its turn.
        """
        ready: dict[str, Stopwatch] = {}
        chosen = {provider.name: provider for provider in problem.providers if self._is_wanted(provider)}
        try:
            for name, provider in sorted(chosen.items(), key=lambda item: item[1].compiled):
                stopwatch = self._prepare(problem, provider)
                if stopwatch is not None:
                    ready[name] = stopwatch
                    if not stopwatch.is_long:
                        self._burst(problem, provider, ready)
                self._free()
            self._take_turns(problem, chosen, ready)
            for name, stopwatch in ready.items():
                self._watch(problem, chosen[name], stopwatch)
        finally:
            timings = {name: stopwatch.spreads() for name, stopwatch in ready.items() if stopwatch.samples}
            for name in timings:
                for row in _timing_rows(problem, chosen[name], ready, timings):
                    self.emit(row)
            for fact in problem.derive(timings):
                self.emit(
                    _number(problem, chosen[fact.provider], fact.mode, fact.metric, fact.value, note=fact.note)
                )

    def _prepare(self, problem: Problem, provider: Provider) -> Stopwatch | None:
        """The provider built, checked and warm; None where it may not be timed."""
        if self._is_late(BUILDING * self._share(problem)):
            self._report(problem, provider, SKIPPED, "time limit")
            return None
        if not provider.fits(self.setup):
            self.emit(_row(problem, provider, "", "", status=SKIPPED, note="needs a GPU"))
            return None
        self.say(f"{problem}: {provider.name}")
        if self.cold:
            torch._dynamo.reset()
        try:
            work = provider.build()
            stopwatch = Stopwatch(work, self.setup.device, together=self.by_host)
            seconds = stopwatch.start_up()
            errors = work.errors() if work.errors and not self.unchecked else {}
            worst = max(errors.values(), key=lambda e: float("inf") if e != e else e, default=None)
            if excess := problem.excess(errors):
                self._report(problem, provider, DISAGREES, excess, worst)
                return None
            if provider.compiled:
                note = "cold" if self.cold else "with what this run has compiled before"
                self.emit(_number(problem, provider, "start", "s", seconds, error=worst, note=note))
            if self.cold:
                return None
            needs_more = provider.compiled or work.records
            stopwatch.warm_up(0 if seconds > SLOW and not needs_more else 2)
            peak = stopwatch.peak_bytes()
        except Exception as error:
            self._report(problem, provider, FAILED, _first_line(error))
            if os.environ.get("ALTUP_TRACEBACK"):
                traceback.print_exc()
            return None
        if peak is not None and provider.kind != "floor":
            self.emit(_number(problem, provider, work.whole, "GiB", peak / GIB, error=worst))
        return stopwatch

    def _take_turns(self, problem: Problem, chosen: dict[str, Provider], ready: dict[str, Stopwatch]) -> None:
        """In every round each provider has one burst; what was timed before does not count beside them, unless
        it took long.

        One round is always made: it takes little time beside building, which would be wasted without it.
        """
        for number, name in take_turns(ready, self.rounds):
            if number and self._is_late(self._share(problem)):
                return
            if not number and ready[name].is_long:
                continue
            if not number:
                ready[name].forget()
            self._burst(problem, chosen[name], ready)

    def _watch(self, problem: Problem, provider: Provider, stopwatch: Stopwatch) -> None:
        """The GPU's clock and power during a step of some milliseconds, and where its time goes."""
        if provider.kind == "floor" or self._is_late(self._share(problem)):
            return
        if problem.case in WHOLE_STEPS:
            for metric, value in stopwatch.clock_and_power().items():
                self.emit(_number(problem, provider, stopwatch.work.whole, metric, value))
        if self.profile:
            print_profile(f"{problem}: {provider.name}", stopwatch.refill, self.setup.device)

    def _burst(self, problem: Problem, provider: Provider, ready: dict[str, Stopwatch]) -> None:
        try:
            if self._is_crowded():
                self._free()
                ready[provider.name].refill()
            ready[provider.name].burst()
        except Exception as error:
            del ready[provider.name]
            self._report(problem, provider, FAILED, _first_line(error))

    def _share(self, problem: Problem) -> float:
        """The part of the time limit after which a case gives way to the next ones."""
        if problem.case not in self.cases:
            return 1.0
        return (list(self.cases).index(problem.case) + 1) / len(self.cases)

    def _is_wanted(self, provider: Provider) -> bool:
        if self.cold and not provider.compiled:
            return False
        return not self.only or any(fnmatch.fnmatch(provider.name, pattern) for pattern in self.only)

    def _free(self) -> None:
        """Free memory that only building, checking or failed providers used."""
        gc.collect()
        if self.setup.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_crowded(self) -> bool:
        """Whether memory that PyTorch keeps for the provider before is missing for the next: its first
        allocations would wait for the device, and count."""
        if self.setup.device.type != "cuda":
            return False
        whole = torch.cuda.get_device_properties(self.setup.device).total_memory
        return 3 * torch.cuda.memory_reserved(self.setup.device) > whole

    def _is_late(self, share: float = 1.0) -> bool:
        return time.monotonic() - self._begun > share * self.time_limit

    def _report(
        self, problem: Problem, provider: Provider, status: str, note: str, error: float | None = None
    ) -> None:
        self.say(f"  {status}: {note}")
        self.emit(_row(problem, provider, "", "", status=status, note=note, error=error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:300]


def _row(problem: Problem, provider: Provider, mode: str, metric: str, **more: Any) -> BenchRow:
    sizes: dict[str, Any] = problem.sizes
    return BenchRow(problem.case, provider.name, provider.kind, mode, metric, **sizes, **more)


def _number(problem: Problem, provider: Provider, mode: str, metric: str, value: float, **more: Any) -> BenchRow:
    return _row(problem, provider, mode, metric, p20=value, p50=value, p80=value, samples=1, **more)


def _spread(problem: Problem, provider: Provider, mode: str, metric: str, spread: Spread) -> BenchRow:
    return _row(problem, provider, mode, metric, **vars(spread))


def measure(
    config: BenchConfig,
    open_sheets: Callable[[Machine], list[Sheet]],
    say: Callable[[str], None],
    make: Callable[[Sequence[str], Setup], Iterable[Problem]] = problems,
) -> list[BenchRow]:
    """The rows of some cases on this machine, which are added to the sheets as they come; Ctrl-C keeps them.
    `make` makes the problems, by default those of the cases in the config."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not config.quick and config.cases != ["data"]:
        raise UserError("the full sizes need a CUDA GPU, and there is none here; add --quick")
    device = torch.device("cuda" if on_gpu else "cpu")
    setup = Setup(device, config.quick, tuple(config.sizes), compiles=on_gpu, runs_triton=on_gpu)
    sheets = open_sheets(Machine.here(device, setup.dtype))
    rows: list[BenchRow] = []

    def emit(row: BenchRow) -> None:
        rows.append(row)
        for sheet in sheets:
            sheet.add(row)

    limit = config.time_limit or float("inf")
    runner = Runner(
        setup, emit, say, config.only, config.repeat or 1, limit, config.cold, config.cases,
        config.where, config.unchecked, config.clock == "host", config.profile,
    )  # fmt: skip
    try:
        with fast_math(), _stopped_by_sigterm(), stopped_after(limit):
            runner.run(make(config.cases, setup))
    except TimeIsUp:
        say("time limit: what was measured is kept")
    except KeyboardInterrupt:
        say("stopped; what was measured is kept")
    names = ", ".join(config.cases)
    if config.where and not rows:
        raise UserError(f"--where {' '.join(config.where)}: nothing of {names} has these sizes")
    if config.only and all(row.p50 is None and row.status == OK for row in rows):
        raise UserError(f"--only {' '.join(config.only)}: no provider of {names} has such a name")
    return rows


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, as `timeout` sends it, is as Ctrl-C: what was measured is shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class TimeIsUp(BaseException):
    """The time limit has come while something was built or timed; no provider may take it for its own failure."""


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """TimeIsUp after so many seconds, as soon as Python code runs again."""
    if seconds == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def fast_math() -> Iterator[None]:
    """What a user who cares for speed turns on, for every provider: TF32 for what stays float32, and sums in bf16
    in SDPA's "math" path, which Hugging Face's T5 takes because its bias requires a gradient."""
    precision = torch.get_float32_matmul_precision()
    reduces = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduces)


def _timing_rows(
    problem: Problem, provider: Provider, ready: dict[str, Stopwatch], timings: Timings
) -> Iterator[BenchRow]:
    """Milliseconds in every mode; of the whole, also the rate and the ratio to the baseline with its interval."""
    name, work = provider.name, ready[provider.name].work
    for mode, spread in timings[name].items():
        yield _spread(problem, provider, mode, "ms", spread)
    whole = timings[name][work.whole]
    if work.per_repetition:
        slow, middle, fast = (1000 * work.per_repetition / ms for ms in (whole.p80, whole.p50, whole.p20))
        yield _spread(problem, provider, work.whole, work.unit, Spread(slow, middle, fast, whole.samples))
    baseline = problem.find_baseline(timings, work.whole)
    if baseline is not None and name != baseline and provider.kind != "floor":
        above, below = (ready[n].rounds[work.whole] for n in (baseline, name))
        alike = min(len(above), len(below))  # one that failed has fewer rounds
        ratio = Ratio.of(above[:alike], below[:alike])
        whose = "" if problem.baseline else ", the fastest peer"
        bounds = {"p20": ratio.low, "p50": ratio.p50, "p80": ratio.high, "samples": alike}
        yield _row(problem, provider, work.whole, "speedup", **bounds, note=f"over {baseline}{whose}")
