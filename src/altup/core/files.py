"""Files that survive a kill: atomic writes, flushing to the disk, hashes and locks; and files from anyone.

A file is written under another name, flushed and renamed: a kill at any instant leaves the old one or the new one.
Locks end with the process that holds them. They use `flock` itself, not the `filelock` package: that one cannot
lock a folder, and where a file system has no locks it makes marker files, which a killed process leaves behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from altup.core.errors import UserError

TEMPORARY = ".tmp"  # suffix of a file that is being written
PAUSE = 0.1  # seconds between two attempts at a lock
HEAD = 4096  # bytes at the beginning of a file, by which it is known
SVG, PNG, PDF = b"<svg", b"\x89PNG\r\n\x1a\n", b"%PDF-"
FILE_NAME = re.compile(r"[\w-][\w.-]{0,199}")


def atomic_write(path: Path, content: str | bytes | memoryview | Callable[[Path], object]) -> None:
    """Write or replace a file atomically: it is there whole or not at all. Its folder is created if needed.

    `content` is text (UTF-8), bytes, or a function that writes a file, given its path.
    """
    make_durable(path.parent)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(temporary)
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()  # a file that did not fit must not fill the disk
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)  # the name that the user knows
        raise
    flush(path.parent)


def rename_folder(temporary: Path, folder: Path) -> None:
    """Give a finished folder its name, once all its files are on the disk."""
    for path in [*sorted(temporary.rglob("*")), temporary]:
        flush(path)
    temporary.rename(folder)
    flush(folder.parent)


def make_durable(folder: Path) -> None:
    """Make a folder and those above it, each with its entry on the disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        flush(one.parent)


def make_folder(folder: Path, option: str = "--out") -> None:
    """Make a folder to write to, unless it is there."""
    try:
        make_durable(folder)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise UserError(f"{option} {folder} cannot be made: {reason}; give a new folder") from None


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder (not the files in it), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with check_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file_name(name: str, source: str) -> str:
    """A name that was read from a file and becomes part of a path, if it can lead nowhere else."""
    if not FILE_NAME.fullmatch(name):
        raise UserError(
            f"{source}: {name!r} cannot be a file's name; only letters, digits, '.', '_' and '-' may stand in it, "
            "and no '.' at its beginning"
        )
    return name


def check_relative_path(path: str, source: str) -> str:
    """A path that was read from a file, if it stays below the folder that it is in."""
    for name in path.split("/"):
        check_file_name(name, source)
    return path


def check_regular(path: Path) -> Path:
    """A path that may be opened: a pipe or a device could block or never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is a pipe, a socket or a device; give a file")
    return path


def refuse_foreign(
    path: Path, ours: Sequence[bytes] | Callable[[Path], bool], kind: str, option: str = "--out"
) -> None:
    """UserError for a file that would be written over and is not of this `kind`; an empty one may be.

    `ours`: one of these bytes stands at the beginning of such a file, or a function of its path.
    """
    if not path.exists() or not check_regular(path).stat().st_size:
        return
    if callable(ours):
        known = ours(path)
    else:
        with path.open("rb") as file:
            head = file.read(HEAD)
        known = any(mark in head for mark in ours)
    if not known:
        raise UserError(f"{path} is not {kind} and would be written over; choose another {option}")


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, with a ValueError for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file; OSError or ValueError where it cannot be read or holds none."""
    return parse_json(check_regular(path).read_bytes())


def read_mapping(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError says what else it holds."""
    value = read_json(path)
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else repr(value)[:40]
        raise ValueError(f"it holds {kind} where a mapping belongs")
    return value


class Lock:
    """An exclusive lock on a folder or a file (created if needed). It ends with the process at the latest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    @property
    def lost(self) -> bool:
        """Whether the path no longer leads to what is locked: it was removed, or another stands in its place."""
        if self._descriptor is None:
            return True
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return True

    def acquire(self, keep_waiting: Callable[[], bool] | None = None) -> bool:
        """Whether the lock is held now. While another process holds it, wait while `keep_waiting()` is true."""
        if self.held:
            return True
        if not self.path.is_dir():
            make_durable(self.path.parent)
        flags = os.O_RDONLY if self.path.is_dir() else os.O_RDWR | os.O_CREAT
        descriptor = os.open(self.path, flags, 0o666)
        try:
            while not _try_lock(descriptor):
                if keep_waiting is None or not keep_waiting():
                    return False
                time.sleep(PAUSE)
            self._descriptor = descriptor
            return True
        finally:
            if not self.held:
                os.close(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def locked(path: Path, refusal: str | None) -> Iterator[Lock]:
    """Hold the lock on a file or folder; UserError(refusal) where another process has it, or wait without one.

    A process that only looks whether it is held (`is_locked`) is no reason to refuse.
    """
    lock = Lock(path)
    end = time.monotonic() + 2 * PAUSE
    if not lock.acquire(keep_waiting=lambda: refusal is None or time.monotonic() < end):
        raise UserError(str(refusal))
    try:
        yield lock
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file or folder."""
    if not path.exists():
        return False
    lock = Lock(path)
    free = lock.acquire()
    lock.release()
    return not free


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
