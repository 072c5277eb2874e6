"""Runs share machines: a run saves and stops when a signal asks it to, and takes turns on a shared GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from altup.core.files import Lock

STOPPED = 75  # exit code (EX_TEMPFAIL) of a run that stopped on request with everything saved; --resume continues
# A terminal that closes sends SIGHUP, a scheduler whose time is over SIGUSR1 (SLURM's --signal=USR1@120).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PLEASE_WAIT = "saving; please wait\n"
CLEAR_LINE = "\r\x1b[2K"
GPU_LOCK = "ALTUP_TURN"  # the environment variable that names the file locked by the run whose turn it is


class StopRequest:
    """Context in which the first of `SIGNALS` only sets `requested`: the loop finishes its step and saves.

    A second one ends the process at once, but not while `saving`. A SIGHUP that is ignored (`nohup`) stays so.
    """

    def __init__(self) -> None:
        self.requested = self.saving = False
        self._answered = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = handle_signals(self._handle)
        return self

    @contextlib.contextmanager
    def while_saving(self) -> Iterator[None]:
        before, self.saving = self.saving, True
        try:
            yield
        finally:
            self.saving = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.saving:
            self._answer()
        elif self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True

    def _answer(self) -> None:
        """Write the message once, without `print`, which the signal may have interrupted.

        In a terminal it takes the place of the line that shows the progress, which is written again below it.
        """
        if not self._answered and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, f"{CLEAR_LINE if os.isatty(2) else ''}{PLEASE_WAIT}".encode())
        self._answered = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def handle_signals(handle: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Handle `SIGNALS`, without a SIGHUP that is ignored; gives the handlers before."""
    heard = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    return {number: signal.signal(number, handle) for number in heard}


def ignore_signals() -> None:
    """Ignore signals at the end of a process, whose work is saved: a signal would only show as an error."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stop_when_closed(descriptor: int) -> None:
    """Send this process SIGTERM once the other end of a pipe is closed.

    The process that holds it may end in any way, killed or crashed: its files are closed. So what works for it
    saves and ends with it.
    """

    def watch() -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="altup-parent", daemon=True).start()


class GpuTurn:
    """Runs that share a GPU train one after the other, while the others load, compile and wait.

    Training at once they would together make no more steps than one alone, if that one fills the GPU. The turn is
    a lock on the file that the environment names; without one there is nothing to wait for.
    """

    def __init__(self) -> None:
        path = os.environ.get(GPU_LOCK)
        self._lock = Lock(Path(path)) if path is not None else None

    def wait(self, give_up: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Wait until no other run has the turn, or `give_up()` is true."""
        if self._lock is None or give_up() or self._lock.acquire():
            return
        say("started; waiting for its turn to train on this device")
        self._lock.acquire(keep_waiting=lambda: not give_up())

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()
