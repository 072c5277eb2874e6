"""SIGTERM and SIGINT as a request: the step is finished and saved; a second one ends at once, but for a save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PLEASE_WAIT = "saving; please wait\n"


class StopRequest:
    """Context in which the first SIGTERM or SIGINT only sets `requested`. While `saving`, all do no more."""

    def __init__(self) -> None:
        self.requested = self.saving = False
        self._answered = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    @contextlib.contextmanager
    def while_saving(self) -> Iterator[None]:
        before, self.saving = self.saving, True
        yield
        self.saving = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.saving:
            self._answer()
        elif self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True

    def _answer(self) -> None:
        """Once, and not by `print`, which the signal may have interrupted."""
        if not self._answered and os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, PLEASE_WAIT.encode())
        self._answered = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """For a process's last moments: all is said and done, and a signal would only be told as an error."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
