"""A disk that forgets: what a power cut may leave of a piece of work, at every instant of it.

While the work runs, every change of a folder is recorded, and every `fsync`. What a disk may have at a cut is
less: the entries of a folder as of its last flush, and of the later changes any prefix, all but one, or one alone
(disks write in their own order); of a file its content as of its last flush, or a beginning of the rest. Each of
these states is built and handed to a check. As in ALICE and CrashMonkey, but for one process and small files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WATCHED = ("fsync", "rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir")
Entries = dict[str, int]  # of a folder: name → inode
Change = tuple[int, dict[str, int | None]]  # the folder, and its names that are new (or gone: None)


@dataclass
class Snapshot:
    """What the disk may hold at an instant."""

    folders: dict[int, Entries]  # as of their last flush
    files: dict[int, bytes]  # the same
    pending: list[Change]  # changes of folders that were not flushed, in their order
    unflushed: dict[int, bytes]  # files whose content is another by now

    def states(self) -> Iterator[tuple[list[Change], bool]]:
        """Changes that have reached the disk, and whether unflushed files have a beginning of their content."""
        number = len(self.pending)
        chosen = [self.pending[:count] for count in range(number + 1)]
        chosen += [[one] for one in self.pending[1:]]
        chosen += [self.pending[:index] + self.pending[index + 1 :] for index in range(number - 1)]
        return itertools.product(chosen, (False, True))

    def build(self, root: int, place: Path, changes: list[Change], torn: bool) -> str:
        """Make a state on the real disk; what it is, for comparing."""
        folders = {inode: dict(entries) for inode, entries in self.folders.items()}
        for folder, names in changes:
            entries = folders.setdefault(folder, {})
            for name, inode in names.items():
                if inode is None:
                    entries.pop(name, None)
                else:
                    entries[name] = inode
        described: list[str] = []
        self._build(root, place, folders, torn, described)
        return "\n".join(described)

    def _build(
        self, inode: int, place: Path, folders: dict[int, Entries], torn: bool, described: list[str]
    ) -> None:
        place.mkdir()
        for name, child in sorted(folders.get(inode, {}).items()):
            if child in folders:
                described.append(f"{place.name}/{name}/")
                self._build(child, place / name, folders, torn, described)
                continue
            content = self.files.get(child, b"")
            if torn and child in self.unflushed:
                content = self.unflushed[child][: len(self.unflushed[child]) // 2]
            (place / name).write_bytes(content)
            described.append(f"{place.name}/{name} {hash(content)}")


@dataclass
class ForgettingDisk:
    """Records what is done to the folder `root`. What is there at the beginning is on the disk."""

    root: Path
    snapshots: list[Snapshot] = field(default_factory=list)
    forget_flush: Callable[[int], bool] = lambda mode: False  # of what kind of file it is not done

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}  # a descriptor of everything seen, so that no inode is used twice
        self._now: dict[int, Entries] = {}
        self._contents: dict[int, bytes] = {}
        self.folders: dict[int, Entries] = {}
        self.files: dict[int, bytes] = {}
        self.pending: list[Change] = []
        self._scan()
        self.folders, self.files, self.pending = (
            {n: dict(e) for n, e in self._now.items()},
            dict(self._contents),
            [],
        )

    def _scan(self) -> None:
        """Take up what has changed since the last time: new and vanished names, and contents."""
        seen: dict[int, Entries] = {}

        def walk(path: Path) -> int:
            state = path.lstat()
            if state.st_ino not in self._open:
                self._open[state.st_ino] = os.open(path, os.O_RDONLY)
            if stat.S_ISDIR(state.st_mode):
                seen[state.st_ino] = {
                    name: walk(path / name) for name in sorted(one.name for one in path.iterdir())
                }
            else:
                self._contents[state.st_ino] = path.read_bytes()
            return state.st_ino

        walk(self.root)
        for folder, entries in seen.items():
            before = self._now.get(folder, {})
            names = {
                name: entries.get(name) for name in {**before, **entries} if before.get(name) != entries.get(name)
            }
            if names:
                self.pending.append((folder, names))
        self._now = {**self._now, **seen}

    def _cut(self) -> None:
        """The power may fail here."""
        unflushed = {
            inode: content for inode, content in self._contents.items() if self.files.get(inode) != content
        }
        folders = {inode: dict(entries) for inode, entries in self.folders.items()}
        for folder, _ in self.pending:
            folders.setdefault(folder, {})
        for inode in self._now:
            folders.setdefault(inode, {})
        self.snapshots.append(Snapshot(folders, dict(self.files), list(self.pending), unflushed))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        originals = {name: getattr(os, name) for name in WATCHED}

        def watched(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                with self._lock:
                    self._scan()
                    if name == "fsync":
                        return self._flush(arguments[0])
                    result = originals[name](*arguments, **options)
                    self._scan()
                    self._cut()
                    return result

            return call

        for name in WATCHED:
            setattr(os, name, watched(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
            self._scan()
            self._cut()
            for descriptor in self._open.values():
                os.close(descriptor)

    def _flush(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        if self.forget_flush(state.st_mode):
            return
        self._cut()
        if stat.S_ISDIR(state.st_mode):
            self.folders[state.st_ino] = dict(self._now.get(state.st_ino, {}))
            self.pending = [change for change in self.pending if change[0] != state.st_ino]
        else:
            self.files[state.st_ino] = self._contents[state.st_ino]
        self._cut()


def check_every_cut(
    folder: Path,
    work: Callable[[Path], object],
    check: Callable[[Path], object],
    done: Callable[[Path], object],
    forget_flush: Callable[[int], bool] = lambda mode: False,
) -> int:
    """Do `work(folder)`, and `check` every state in which a power cut during it may leave the folder; `done` those
    in which a cut after it may. Gives the number of different states."""
    disk = ForgettingDisk(folder, forget_flush=forget_flush)
    with disk.watching():
        work(folder)
    root, seen = folder.stat().st_ino, set[str]()
    place = folder.with_name(f"{folder.name}-after-the-cut") / folder.name
    for number, snapshot in enumerate(disk.snapshots):
        last = number == len(disk.snapshots) - 1
        for changes, torn in snapshot.states():
            shutil.rmtree(place.parent, ignore_errors=True)
            place.parent.mkdir()
            described = snapshot.build(root, place, changes, torn)
            if last:
                done(place)
            elif described not in seen:
                check(place)
            seen.add(described)
    shutil.rmtree(place.parent)
    return len(seen)
