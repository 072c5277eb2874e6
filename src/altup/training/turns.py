"""Runs that share a device take turns: one trains while others load, compile and wait.

Trained at once they would make no more steps together than one alone, if that fills the device.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

TURN = "ALTUP_TURN"  # the environment's name for the file that is locked by the run whose turn it is
PAUSE = 0.1  # seconds between looks


class Turn:
    """A lock on a file, or nothing where the environment names none. It ends with the process at the latest."""

    def __init__(self) -> None:
        self._path = os.environ.get(TURN)
        self._file: IO[str] | None = None

    def wait(self, given_up: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Until nobody else has it, or `given_up`."""
        if self._path is None or self._file is not None:
            return
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        file = Path(self._path).open("w")  # noqa: SIM115, which is held for as long as the turn lasts
        told = False
        while not given_up():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    say("started; waiting for its turn to train on this device")
                told = True
                time.sleep(PAUSE)
                continue
            self._file = file
            return
        file.close()

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
