"""A console that may be lost (a log's reader that ends, a terminal that closes, a full disk under a log), and a
terminal that obeys what is written to it.

Work whose results are files does not stop for that: what the console cannot take is dropped, and what comes later
is tried again. Verbs whose results are what they print still fail, or they would seem to have succeeded.

Text may come from anyone: a task, a vocabulary, a file's name. In a terminal its control characters are written
out; colours stay, and rich, which draws bars, is left alone: `altup.core.terminal.Console` sees to its text. A
pipe gets every text as it is.
"""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

from altup.core.text import CONTROL, printable

COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


class LastingFile(io.FileIO):
    """A file descriptor to which writing never fails."""

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError:
            return size
        return size if written is None else written  # None: a pipe that does not wait is full


class GuardedText(io.TextIOWrapper):
    """Text that, if it goes to a terminal, only colours it."""

    def write(self, text: str) -> int:
        if self.isatty() and CONTROL.search(text):
            parts = COLOURS.split(text)
            text = "".join(part if number % 2 else _shown(part) for number, part in enumerate(parts))
        return super().write(text)

    @property
    def rich_proxied_file(self) -> Any:
        """What rich writes to instead: its own bars need more than colours."""
        return _Unguarded(self)


class _Unguarded:
    def __init__(self, stream: GuardedText) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _shown(text: str) -> str:
    """Bars of other libraries go back to the beginning of their line."""
    return "\r".join(map(printable, text.split("\r")))


def lasting_stream(descriptor: int, encoding: str | None = None) -> GuardedText:
    """A text stream over a descriptor, which stays open, that writes every line at once and never fails."""
    buffer = io.BufferedWriter(LastingFile(descriptor, "w", closefd=False))
    return GuardedText(buffer, encoding or "utf-8", errors="backslashreplace", line_buffering=True)


def outlive_stderr() -> None:
    """For every verb: messages that cannot be shown change neither the work nor the exit code.

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
    if sys.stdout is None or sys.stdout is sys.__stdout__ or isinstance(sys.stdout, GuardedText):
        sys.stdout = lasting_stream(1, getattr(sys.stdout, "encoding", None))


def guard_stdout() -> None:
    """For every verb: what it prints to a terminal is shown there, and not obeyed."""
    stream = sys.stdout
    if stream is sys.__stdout__ and stream is not None and stream.isatty():
        buffer = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))  # its own: it may be replaced
        sys.stdout = GuardedText(buffer, stream.encoding, errors=stream.errors, line_buffering=True)
