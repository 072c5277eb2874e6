"""What scripts share that time models in turns on a GPU whose seconds count.

Building and compiling may go on beside other work, timing may not. So with `--go FILE` a script builds, says
READY, and times what it has as soon as FILE exists: nothing is built then that could wait.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from altup.bench.runner import TimeIsUp


def age() -> float:
    """Seconds since this process has begun, or 0.0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - begun)
    except (OSError, ValueError, IndexError):
        return 0.0


BEGUN = time.perf_counter() - age()  # imports count
LOOK = 0.1  # seconds between two looks for FILE


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {text}", flush=True)


def in_words(error: BaseException) -> str:
    """The ends of a message: the compiler's are long, and begin and end with what matters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 300 else f'{text[:140]} … {text[-140:]}'}"


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The median of the ratios in each round, and its standard error."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    error = 1.25 * statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")
    return statistics.median(each), error


class Gate:
    """Between building and timing. Without a file it opens when building ends, after `build_s` at the latest.
    Seconds for timing count from then on.
    """

    def __init__(
        self, go: Path | None = None, build_s: float = float("inf"), time_s: float = float("inf")
    ) -> None:
        self.go, self.time_s = go, time_s
        self._until = time.monotonic() + build_s
        self._opened: float | None = None
        self._said = False
        if go is not None and go.exists():
            raise SystemExit(f"{go} exists already, so nothing would be built; remove it")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser, build_s: float, time_s: float) -> None:
        parser.add_argument("--go", type=Path, metavar="FILE", help="build, say READY, and time once FILE exists")
        parser.add_argument(
            "--build-s", type=float, default=build_s, help=f"seconds for building at most; {build_s:g}"
        )
        parser.add_argument(
            "--time-s", type=float, default=time_s, help=f"seconds for timing, from GO on; {time_s:g}"
        )

    @classmethod
    def of(cls, given: argparse.Namespace) -> Gate:
        return cls(given.go, given.build_s, given.time_s)

    @property
    def may_build(self) -> bool:
        has_come = self.go is not None and self.go.exists()
        return self._opened is None and not has_come and time.monotonic() < self._until

    @property
    def left(self) -> float:
        """Seconds for timing."""
        return self.time_s if self._opened is None else self._opened + self.time_s - time.monotonic()

    @contextmanager
    def building(self) -> Iterator[None]:
        """TimeIsUp in the midst of what is built when building must end."""

        def look(*_: object) -> None:
            if not self.may_build:
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise TimeIsUp

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def say_ready(self) -> None:
        if self.go is not None and not self._said:
            self._said = True
            say(f"READY, waiting for {self.go}")

    def wait(self) -> None:
        """Until timing may begin."""
        while self.go is not None and not self.go.exists() and self._opened is None:
            self.say_ready()
            time.sleep(LOOK)
        self.open()

    def open(self) -> None:
        self._opened = self._opened or time.monotonic()
