"""SIGTERM and SIGINT as a request: the step is finished and saved; a second signal ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context in which the first SIGTERM or SIGINT only sets `requested`."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
