"""Runs that share a device take turns: one trains while others load, compile and wait.

Trained at once they would make no more steps together than one alone, if that fills the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from altup.core.files import Lock

TURN = "ALTUP_TURN"  # the environment's name for the file that is locked by the run whose turn it is


class Turn:
    """A lock on a file, or nothing where the environment names none. It ends with the process at the latest."""

    def __init__(self) -> None:
        path = os.environ.get(TURN)
        self._lock = Lock(Path(path)) if path is not None else None

    def wait(self, given_up: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Until nobody else has it, or `given_up`."""
        if self._lock is None or given_up() or self._lock.acquire():
            return
        say("started; waiting for its turn to train on this device")
        self._lock.acquire(keep_waiting=lambda: not given_up())

    def end(self) -> None:
        if self._lock is not None:
            self._lock.release()
