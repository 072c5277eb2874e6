"""Checkpoints that appear whole or not at all, and that show it when they are damaged later.

A checkpoint is a folder `step-N` with a manifest of the sizes and hashes of its files. It is written under
another name, flushed to the disk and renamed; what a kill leaves behind starts with a dot and is removed at
the next start. Tensors are stored as safetensors, all else as JSON: no file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from altup.core.errors import UserError, check_whole, may_not_write
from altup.core.files import files_below, flush, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "SHA256SUMS.json"
UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
STEP = re.compile(r"step-(\d+)")
THREADS = 8

log = logging.getLogger(__name__)


def publish(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Makes the checkpoint `folder/name` out of what `write(temporary folder)` writes; an older one of that
    name is replaced. A kill at any instant leaves the earlier checkpoints, and this one whole or not at all.

    One process at a time may publish into a folder. A full disk or the like raises UserError.
    """
    target = folder / name
    temporary = folder / f"{UNFINISHED}{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flush(folder.parent)
        remove_leftovers(folder)
        temporary.mkdir()
        write(temporary)
        _seal(temporary)
        _replace(target, temporary)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove_leftovers(folder)
        # Libraries in Rust (tokenizers) raise a bare Exception where the system refuses.
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            remedy = "make the folder writable" if may_not_write(error) else "free space or mend the disk"
            raise UserError(
                f"could not save {target}: {error}. The checkpoints before it are untouched; {remedy}, then resume"
            ) from error
        raise
    return target


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a published checkpoint, or None where every file is as it was written."""
    try:
        sums = json.loads((checkpoint / MANIFEST).read_bytes())
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


def same_model(one: Path | None, other: Path) -> bool:
    """Whether two published folders hold the same weights, by their manifests."""

    def weights(folder: Path) -> dict[str, Any]:
        sums = load_json(folder / MANIFEST)
        return {path: entry["sha256"] for path, entry in sums.items() if path.startswith("model")}

    return one is not None and (other / MANIFEST).exists() and weights(one) == weights(other)


def newest_whole(folder: Path) -> Path | None:
    """The checkpoint with the highest step whose manifest verifies; the log says which were passed over."""
    for checkpoint in reversed(steps(folder)):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        log.warning("passing over the damaged checkpoint %s: %s", checkpoint, problem)
    return None


def steps(folder: Path) -> list[Path]:
    """The published checkpoints in `folder`, oldest first, whole or damaged."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """17 for `.../step-17`."""
    match = STEP.fullmatch(checkpoint.name)
    if not match:
        raise UserError(f"{checkpoint} is not named like a checkpoint; expected step-N")
    return int(match[1])


def prune(folder: Path, keep_last: int, keep: Collection[str] = ()) -> list[str]:
    """Removes all but the last `keep_last` checkpoints, those named in `keep` (the best, say) and, should all
    of these be damaged, the newest whole one. Returns the names that were removed."""
    check_whole("keep_last", keep_last, 1)
    spare = [path for path in steps(folder)[:-keep_last] if path.name not in keep]
    if not spare:
        return []
    whole = newest_whole(folder)
    removed = [path for path in spare if path != whole]
    for path in removed:
        _remove(path)
    return [path.name for path in removed]


def remove_leftovers(folder: Path) -> list[str]:
    """Clears away what a kill left in `folder`; to be called at the start of a run, by one process.

    A checkpoint that was about to be replaced, and whose successor did not arrive, gets its name back.
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
            _remove(path)
        elif path.name.startswith(UNFINISHED):
            shutil.rmtree(path)
        else:
            continue
        removed.append(path.name)
    return removed


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file onto the CPU; anything else, a pickle above all, is refused."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error


def save_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error


def _seal(checkpoint: Path) -> None:
    """Flushes all files, then writes and flushes the manifest and the folders."""
    files = files_below(checkpoint)
    names = [file.relative_to(checkpoint).as_posix() for file in files]
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(sha256_of, files)
        list(pool.map(flush, files))
    entries = {
        name: {"bytes": file.stat().st_size, "sha256": digest}
        for name, file, digest in zip(names, files, hashes, strict=True)
    }
    save_json(checkpoint / MANIFEST, entries)
    flush(checkpoint / MANIFEST)
    for path in [*checkpoint.rglob("*"), checkpoint]:
        if path.is_dir():
            flush(path)


def _replace(target: Path, finished: Path) -> None:
    """Gives `finished` its name. An older folder of that name steps aside first, for `remove_leftovers` to
    bring back should we be killed in between."""
    aside = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        target.rename(aside)
    finished.rename(target)
    flush(target.parent)
    if aside.exists():
        _remove(aside)


def _remove(checkpoint: Path) -> None:
    """Renames first, so that no half-removed checkpoint ever bears a checkpoint's name."""
    unfinished = checkpoint.with_name(f"{UNFINISHED}{checkpoint.name}")
    checkpoint.rename(unfinished)
    flush(checkpoint.parent)
    shutil.rmtree(unfinished)
