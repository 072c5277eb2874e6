"""Folders that appear whole or not at all, sealed with the sizes and hashes of their files; and JSON files
that hold their own hash.

A folder is written under another name (`atomic_folder`), gets a manifest, is flushed and renamed. A kill leaves at
worst a folder whose name starts with a dot, which `remove_leftovers` clears away at the next start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from altup.core.errors import UserError, disk_remedy, is_system_error
from altup.core.files import (
    atomic_write,
    check_relative_path,
    files_below,
    flush,
    locked,
    make_folder,
    read_json,
    read_mapping,
    sha256_of,
)

MANIFEST = "SHA256SUMS.json"
SEAL = "sha256"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
THREADS = 8


def atomic_folder(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Make the folder `folder/name`, sealed with a manifest, of what `write(temporary folder)` writes.

    An older one of that name is replaced. A kill at any instant leaves this one and all others whole or not there.
    One process at a time may write to `folder`; what it is in must be there, as a run that was removed must not
    come back. A full disk or the like raises UserError.
    """
    target = folder / name
    try:
        with save_errors(target):
            temporary = begin_folder(target)
            write(temporary)
            seal(temporary)
            rename_over(target, temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_leftovers(folder)
        raise
    return target


def begin_folder(target: Path) -> Path:
    """An empty folder to write to, beside the one that it becomes."""
    folder = target.parent
    folder.mkdir(exist_ok=True)
    flush(folder.parent)
    remove_leftovers(folder)
    temporary = folder / f"{UNFINISHED}{target.name}"
    temporary.mkdir()
    return temporary


@contextlib.contextmanager
def new_sealed_folder(target: Path, option: str = "--out") -> Iterator[Path]:
    """A folder to write to, which becomes `target`, new or empty, with a manifest once all is written.

    A kill, an error or a full disk leave nothing of that name, or an empty folder where there was one. While one
    process writes, another is refused.
    """
    with contextlib.suppress(RuntimeError, OSError):  # a loop of links: making the folder says it
        target = target.resolve()
    fresh = not target.exists()
    make_folder(target, option)
    temporary = target.with_name(f"{UNFINISHED}{target.name}")
    try:
        if os.path.ismount(target) or target == Path.cwd():
            raise UserError(f"{option} {target} is a disk or the folder that you are in; give a new folder in it")
        with locked(target, f"{option} {target}: another process writes there; wait for it, or give a new folder"):
            if any(target.iterdir()):
                raise UserError(f"{option} {target} is not empty; give a new folder")
            with save_errors(target):
                shutil.rmtree(temporary, ignore_errors=True)  # left by a kill
                try:
                    temporary.mkdir()
                    yield temporary
                    seal(temporary)
                    temporary.rename(target)
                    flush(target.parent)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
    except BaseException:
        if fresh:
            with contextlib.suppress(OSError):  # it holds something by now
                target.rmdir()
        raise


@contextlib.contextmanager
def save_errors(target: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a UserError that says what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or (is_system_error(error) and not isinstance(error, UserError)):
            raise UserError(
                f"could not save {target}: {error}. What was there before is untouched; {disk_remedy(error)}, "
                "then run the same command again"
            ) from error
        raise


def seal(checkpoint: Path, known: Mapping[str, Any] | None = None) -> None:
    """Flush all files, then write and flush the manifest and the folders.

    Files that are `known` are flushed and hashed already: `{name: {"bytes", "sha256"}}`.
    """
    entries = dict(known or {})
    files = {file.relative_to(checkpoint).as_posix(): file for file in files_below(checkpoint)}
    files = {name: file for name, file in files.items() if name not in entries}
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(sha256_of, files.values())
        list(pool.map(flush, files.values()))
    for (name, file), digest in zip(files.items(), hashes, strict=True):
        entries[name] = {"bytes": file.stat().st_size, "sha256": digest}
    save_json(checkpoint / MANIFEST, dict(sorted(entries.items())))
    flush(checkpoint / MANIFEST)
    for path in [*checkpoint.rglob("*"), checkpoint]:
        if path.is_dir():
            flush(path)


def rename_over(target: Path, finished: Path) -> None:
    """Give `finished` its name. An older folder of that name steps aside first; after a kill in between
    `remove_leftovers` brings it back."""
    aside = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        target.rename(aside)
    finished.rename(target)
    flush(target.parent)
    if aside.exists():
        remove(aside)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None where every file is as it was written."""
    try:
        sums = read_json(checkpoint / MANIFEST)
        for path in sums:
            check_relative_path(path, MANIFEST)
        sizes = {checkpoint / path: entry["bytes"] for path, entry in sums.items()}
        digests = {checkpoint / path: entry["sha256"] for path, entry in sums.items()}
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    if not sums:
        return f"{MANIFEST} names no file"
    try:
        for file, size in sizes.items():
            if (found := file.stat().st_size) != size:
                return f"{file.name} has {found} bytes instead of {size}"
        with ThreadPoolExecutor(THREADS) as pool:
            for file, digest in zip(digests, pool.map(sha256_of, digests), strict=True):
                if digest != digests[file]:
                    return f"the contents of {file.name} have changed"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


def remove_leftovers(folder: Path) -> list[str]:
    """Clear away what a kill left in `folder`; to be called at the start of a run, by one process.

    A checkpoint that was about to be replaced, and whose successor is not there, gets its name back.
    """
    if not folder.is_dir():
        return []
    removed = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(REPLACED):
            target = folder / path.name.removeprefix(REPLACED)
            if not target.exists():
                path.rename(target)
                flush(folder)
                continue
            remove(path)
        elif path.name.startswith(UNFINISHED):
            shutil.rmtree(path)
        else:
            continue
        removed.append(path.name)
    return removed


def remove(checkpoint: Path) -> None:
    """Rename first, so that no half-removed checkpoint has a checkpoint's name."""
    unfinished = checkpoint.with_name(f"{UNFINISHED}{checkpoint.name}")
    checkpoint.rename(unfinished)
    flush(checkpoint.parent)
    shutil.rmtree(unfinished)


def write_sealed_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with a hash of itself: for files that decide what is computed."""
    atomic_write(path, json.dumps({**content, SEAL: _digest(content)}, indent=1) + "\n")


def read_sealed_json(path: Path) -> dict[str, Any]:
    """What `write_sealed_json` wrote; ValueError where it is not as it was written."""
    content = read_mapping(path)
    if content.pop(SEAL, None) != _digest(content):
        raise ValueError(f"it was changed after it was written: its {SEAL} does not fit")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # where keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load_json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
