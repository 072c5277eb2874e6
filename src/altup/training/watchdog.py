"""A watchdog: a step that takes far longer than usual is reported, and one that does not end ends the run.

A data disk, a network or a GPU that hangs stops a run without an error, and with several ranks all of them wait
for one. A thread of every rank counts the seconds in which no step was finished. It tells where the ranks stand,
and after a limit ends the process with the exit code that asks for a restart; what was saved is whole.

Not counted are evaluations, saves and waiting for a turn (`excused`), and compiling, here or on another rank; and
time in which the whole process was stopped, because the thread counts its own looks and not the clock.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from altup.core.text import duration
from altup.training.preemption import STOPPED

if TYPE_CHECKING:
    from altup.training.parallel import ProcessGroup

PAUSE = 5.0  # seconds between two looks, at most
SLOW = 60.0  # seconds of a step that are worth a word, at least
TIMES = 10  # the longest of the last steps, that are far longer than usual
REMEMBERED = 200  # steps
SILENT = 4  # looks without a sign of life of another rank
HERE = str(Path(__file__).parents[1])  # the package
# Files that are on the stack only while something is compiled, or while someone looks into it with a debugger.
PATIENT = (
    "/bdb.py",
    "pydevd.py",
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/async_compile.py",
    "triton/compiler/compiler.py",
    "triton/runtime/build.py",
)


class Watchdog:
    """Context of a run's steps, on every rank. `minutes` without a finished step end the process; 0: never."""

    def __init__(self, minutes: float, process_group: ProcessGroup, say: Callable[[str], None]) -> None:
        self._limit, self._group, self._say = 60 * minutes, process_group, say
        self._pause = min(PAUSE, self._limit / 20)
        self._gaps: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._step, self._since, self._idle, self._warned = 0, time.monotonic(), 0.0, False
        self._aside = ""  # what is happening that may take any time
        self._board: Any = None  # where ranks tell each other how they stand
        self._signs = 0
        self._heard: dict[int, tuple[int, int]] = {}  # rank → its last sign of life, and looks since
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="altup-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._limit:
            self._watched, self._since = threading.get_ident(), time.monotonic()
            self._board = self._group.board()
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def beat(self, step: int) -> None:
        """A step was finished."""
        now = time.monotonic()
        self._gaps.append(now - self._since)
        self._step, self._since, self._idle, self._warned = step, now, 0.0, False

    @contextlib.contextmanager
    def excused(self, what: str) -> Iterator[None]:
        """Something that may take any time."""
        self._aside = what
        try:
            yield
        finally:
            self._aside, self._idle, self._since = "", 0.0, time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(self._pause):
            frames = sys._current_frames()
            busy = self._aside or ("compiling" if any(map(_is_patient, frames.values())) else "")
            self._idle = 0.0 if busy else self._idle + self._pause
            stands = busy or f"step {self._step + 1:,}, {_place(frames.get(self._watched))}"
            usual = max(self._gaps, default=0.0)
            limit = max(self._limit, TIMES * usual)
            self._signs += 1
            self._post({"stands": stands, "busy": bool(busy), "sign": self._signs})
            if self._idle < min(max(SLOW, TIMES * usual), limit / 2) or self._ended.is_set():
                continue
            others = self._look()
            if any(other["busy"] for other in others.values()):
                self._idle = 0.0  # they will come
                continue
            mine = {self._group.rank: stands}
            ranks = "; ".join(f"rank {n}: {s}" for n, s in sorted((mine | _stands(others)).items()))
            if self._idle >= limit:
                self._end(ranks)
            if not self._warned and self._group.is_first:
                self._say(
                    f"warning: no step was finished for {duration(self._idle)}, where {duration(usual)} are "
                    f"usual. {ranks}"
                )
            self._warned = True

    def _end(self, ranks: str) -> None:
        text = (
            f"altup: no step was finished for {duration(self._idle)} (watchdog: {self._limit / 60:g} minutes). "
            f"{ranks}. The run ends with exit code {STOPPED}: start it again with --resume\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # not by `print`, whose lock the thread that hangs may hold
        os._exit(STOPPED)

    def _post(self, news: dict[str, Any]) -> None:
        """Tell the other ranks; a board that does not answer must not stop the watch."""
        if self._board is not None:
            with contextlib.suppress(RuntimeError):
                self._board.set(f"watchdog-{self._group.rank}", json.dumps(news))

    def _look(self) -> dict[int, dict[str, Any]]:
        """What the other ranks have posted, and which of them are silent."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self._group.world_size):
            if self._board is None or rank == self._group.rank:
                continue
            try:
                name = f"watchdog-{rank}"
                news = json.loads(self._board.get(name)) if self._board.check([name]) else {"sign": 0}
            except (RuntimeError, ValueError):
                continue
            before, looks = self._heard.get(rank, (-1, 0))
            looks = 0 if news["sign"] != before else looks + 1
            self._heard[rank] = news["sign"], looks
            silent = looks >= SILENT or not news["sign"]
            found[rank] = {"stands": "silent", "busy": False} if silent else news
        return found


def _stands(others: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {rank: other["stands"] for rank, other in others.items()}


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_patient(frame: FrameType) -> bool:
    return any(one.f_code.co_filename.endswith(PATIENT) for one in _stack(frame))


def _place(frame: FrameType | None) -> str:
    """The innermost function of altup that a thread is in, and where it has gone from there."""
    stack = list(_stack(frame))
    own = next((one for one in stack if one.f_code.co_filename.startswith(HERE)), None)
    if own is None:
        return "at an unknown place"
    place = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} {own.f_code.co_name}"
    inside = stack[0]
    return place if inside is own else f"{place} ({Path(inside.f_code.co_filename).name} {inside.f_code.co_name})"
