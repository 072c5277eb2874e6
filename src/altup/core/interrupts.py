"""Ctrl-C before work has begun: while a library is imported, KeyboardInterrupt would be a traceback, another
error, or swallowed, wherever it hits. There the process just ends: nothing is open yet that has to be closed."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 130  # exit code of a shell's command that Ctrl-C has ended
SHOW_CURSOR = b"\x1b[?25h\n"  # which a progress bar may have hidden


def end_on_interrupt() -> None:
    """Ctrl-C ends the process at once and silently, until `raise_on_interrupt`; unless it is ignored."""
    _replace(signal.default_int_handler, _end)


def end_on_termination(code: int) -> None:
    """SIGTERM ends the process at once with this exit code, until somebody handles it: nothing is begun yet."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as Python has it: there is something to close or to tell."""
    _replace(_end, signal.default_int_handler)


def _replace(before: Any, after: Any) -> None:
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) == before:
        signal.signal(signal.SIGINT, after)


def _end(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, SHOW_CURSOR)
    os._exit(INTERRUPTED)
