"""A console that may be lost: a log's reader that ends, a terminal that closes, a full disk under a log.

Work whose results are files does not stop for that: what the console cannot take is dropped, and what comes later
is tried again. Verbs whose results are what they print still fail, or they would seem to have succeeded.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LastingFile(io.FileIO):
    """A file descriptor to which writing never fails."""

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError:
            return size
        return size if written is None else written  # None: a pipe that does not wait is full


def lasting_stream(descriptor: int, encoding: str | None = None) -> io.TextIOWrapper:
    """A text stream over a descriptor, which stays open, that writes every line at once and never fails."""
    buffer = io.BufferedWriter(LastingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding or "utf-8", errors="backslashreplace", line_buffering=True)


def outlive_stderr() -> None:
    """For every verb: messages that nobody can read change neither the work nor the exit code.

    A descriptor that was closed would be given to the next file that is opened, and messages would go there.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None or sys.stderr is sys.__stderr__:  # neither a test's nor a notebook's
        sys.stderr = lasting_stream(2, getattr(sys.stderr, "encoding", None))


def outlive_stdout() -> None:
    """For verbs whose results are files: the same for what they print."""
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = lasting_stream(1, getattr(sys.stdout, "encoding", None))
