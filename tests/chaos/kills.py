"""In a process that is to die: every write below a folder is noted, and a chosen one is its last.

Python's audit events tell of files that are opened, renamed and removed, of folders and of locks, before it
happens; `os.fsync` is wrapped. Nothing in the package knows of it. A kill is SIGKILL, and worse: of files that
were written and not flushed to the disk only a beginning stays, as after a power cut.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
KILLED = "KILLED"
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}


def kind_of(path: str) -> str:
    """A path without its numbers and hashes: `step-3/x` and `step-4/x` are of one kind."""
    named = re.sub(r"\b(runs|finetuned|tuning)/[^/]+/", r"\1/R/", path)
    return re.sub(r"\d+", "N", re.sub(r"\b[0-9a-f]{12}\b", "H", named))


@dataclass
class Reaper:
    """Notes writes below `folder` in `trace`, and dies at the `count`-th of the kind `last`."""

    folder: str
    trace: int  # a file's descriptor
    last: str | None = None
    count: int = 1
    seed: int = 0
    flushed: dict[str, int] = field(
        default_factory=dict
    )  # bytes on the disk of files that were opened to be written

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & WRITES or isinstance(path, int):
                return
            name = self._below(path)
            if name is not None:
                self.note(f"open {name}")
                self._opened(os.path.join(self.folder, name), flags)  # noqa: PTH118
        elif event in CHANGES:
            if any(isinstance(one, int) and one >= 0 for one in arguments[1:]) and event in (
                "os.remove",
                "os.rmdir",
            ):
                base = os.readlink(f"/proc/self/fd/{arguments[-1]}")  # noqa: PTH115
                arguments = (os.path.join(base, os.fsdecode(arguments[0])),)  # noqa: PTH118
            name = self._below(arguments[0])
            if name is not None:
                self.note(f"{event.removeprefix('os.')} {name}")
                if event == "os.rename":
                    old, new = (os.path.abspath(os.fsdecode(one)) for one in arguments[:2])  # noqa: PTH100
                    if old in self.flushed:
                        self.flushed[new] = self.flushed.pop(old)
        elif event == "fcntl.flock":
            name = self._below(os.readlink(f"/proc/self/fd/{_number(arguments[0])}"))  # noqa: PTH115
            if name is not None:
                self.note(f"lock {name}")

    def fsync(self, descriptor: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{_number(descriptor)}")  # noqa: PTH115
        name = self._below(path)
        if name is None:
            _fsync(descriptor)
            return
        whole = os.path.isfile(path)  # noqa: PTH113
        if whole:
            self.flushed.setdefault(path, 0)
        self.note(f"fsync {name}")
        _fsync(descriptor)
        if whole:
            self.flushed[path] = os.stat(path).st_size  # noqa: PTH116

    def note(self, what: str) -> None:
        kind = kind_of(what)
        if kind == self.last:
            self.count -= 1
            if not self.count:
                self._die(kind)
        os.write(self.trace, f"{kind}\n".encode())

    def _die(self, kind: str) -> None:
        draw = random.Random(self.seed)
        torn = []
        for path, flushed in list(self.flushed.items()):
            with contextlib.suppress(OSError):
                size = os.stat(path).st_size  # noqa: PTH116
                if size > flushed:
                    os.truncate(path, draw.randint(flushed, size))
                    torn.append(kind_of(self._below(path) or ""))
        os.write(self.trace, f"{KILLED} {kind}{' torn: ' + ', '.join(torn) if torn else ''}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def _opened(self, path: str, flags: int) -> None:
        try:
            size = os.stat(path).st_size  # noqa: PTH116
        except OSError:
            size = 0
        self.flushed[path] = 0 if flags & os.O_TRUNC else min(self.flushed.get(path, size), size)

    def _below(self, path: Any) -> str | None:
        """The path below the folder; None for others."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        return whole[len(self.folder) + 1 :] if whole.startswith(self.folder + "/") else None


def _number(descriptor: Any) -> int:
    return descriptor if isinstance(descriptor, int) else descriptor.fileno()


_fsync = os.fsync


def arm(folder: Path, trace: Path, last: str | None = None, count: int = 1, seed: int = 0, life: str = "") -> None:
    """To be called in the process, which goes to the folder that holds `folder`: runs then know the same paths,
    and can be compared. Processes that it starts carry `life` in their environment."""
    os.chdir(folder.parent)
    os.environ["ALTUP_CHAOS"] = life
    descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reaper = Reaper(str(folder), descriptor, last, count, seed)
    os.fsync = reaper.fsync  # type: ignore[assignment]
    sys.addaudithook(reaper.watch)


def arm_rank(
    rank: int,
    folder: Path,
    traces: list[Path],
    lasts: list[str | None],
    count: int = 1,
    seed: int = 0,
    life: str = "",
) -> None:
    arm(folder, traces[rank], lasts[rank], count, seed, life)
