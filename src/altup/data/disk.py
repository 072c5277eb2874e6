"""Files that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"
PIECE = 1 << 20


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write beside, flush to the disk, rename: a kill leaves the old file or the new one, never half."""
    beside = path.with_name(path.name + TEMPORARY)
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()  # what does not fit on the disk must not fill it
        raise
    sync_folder(path.parent)


def rename_folder_whole(beside: Path, folder: Path) -> None:
    for path in files_below(beside):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(beside)
    beside.rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
