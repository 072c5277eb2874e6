"""Opening the folder that `prepare` writes: locked, and new, or resumed with the same settings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from altup.core.errors import UserError, disk_remedy, is_system_error
from altup.core.files import TEMPORARY, locked, make_durable
from altup.core.schema import differences
from altup.core.text import number_of, shorten
from altup.data import tokenizer as tokenizers
from altup.data.shards import MANIFEST, SPLITS, TOKENIZER, Manifest, damage, token_type, tokenizer_damage

SHARD_FILE = rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin"
UNFINISHED = re.compile(rf"({re.escape(MANIFEST)}|{TOKENIZER}|{SHARD_FILE}){re.escape(TEMPORARY)}")
PARTS = "parts"
MADE = re.compile(f"{TOKENIZER}|{SHARD_FILE}")


@contextmanager
def system_errors(out: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a `UserError` that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_system_error(error):
            raise UserError(
                f"preparing {out} failed: {error}; {disk_remedy(error)}, then run the same command again to resume"
            ) from error
        raise


@contextmanager
def locked_folder(out: Path) -> Iterator[bool]:
    """Lock the folder for this process; make it if it is missing, and tell whether it was."""
    if out.is_file():
        raise UserError(f"--out {out} is a file; give a new or empty folder")
    fresh = not out.exists()
    make_durable(out)
    with locked(out, f"another `altup prepare` is writing to {out}; wait for it or stop it"):
        yield fresh


def open_manifest(out: Path, settings: dict[str, Any], beside: str = "") -> Manifest:
    """A new manifest, or the existing one with the segments whose shards are intact.

    A folder without one must be empty, but for what is named `beside`.
    """
    if (out / PARTS).exists() and beside != PARTS:
        raise UserError(f"folder {out} is being prepared in parts; give --part, or --merge once all are there")
    if not (out / MANIFEST).exists():
        left = {MANIFEST + TEMPORARY, beside}  # a kill at the start leaves the former
        if found := sorted(path.name for path in out.iterdir() if path.name not in left):
            raise UserError(
                f"folder {out} holds other things ({', '.join(found[:3])}…); give a new or empty folder"
            )
        return _new(out, settings)
    manifest = Manifest.load(out)
    if differing := list(differences(manifest.settings, settings)):
        if not any(segment["shards"] for segment in manifest.segments or []):
            _remove(out, UNFINISHED)
            _remove(out, MADE)  # only a failed attempt is lost
            return _new(out, settings)
        lines = [describe_difference(*one) for one in differing[:8]]
        raise UserError(
            f"folder {out} was made with other settings:\n  " + "\n  ".join(lines) + "\n"
            "give the same settings to continue, or another --out"
        )
    _remove(out, UNFINISHED)
    tokenizer_whole = _tokenizer_whole(out, manifest)
    if not tokenizer_whole:
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    kept = []
    if manifest.vocabulary:
        itemsize = token_type(manifest.vocabulary.size).itemsize
        for segment in manifest.segments or []:
            if any(damage(out, shard, itemsize) for shard in segment["shards"].values()):
                break
            kept.append(segment)
    segments_whole = bool(kept) and len(kept) == len(manifest.segments or [])
    manifest.finished = manifest.finished and tokenizer_whole and segments_whole
    manifest.segments = kept
    return manifest


def describe_difference(name: str, old: Any, new: Any) -> str:
    """`shard_tokens: there 7, now 8`; of two lists their lengths and the first entry that differs."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{name}: there {shorten(repr(old), 80)}, now {shorten(repr(new), 80)}"
    both = min(len(old), len(new))
    index = next((i for i in range(both) if old[i] != new[i]), both)
    if index < both:
        first = describe_difference(*next(differences(old[index], new[index], f"[{index}]")))
    elif len(new) > both:
        first = f"[{index}] is new: {shorten(repr(new[index]), 80)}"
    else:
        first = f"[{index}] is gone: {shorten(repr(old[index]), 80)}"
    things = number_of(len(old), name.rpartition(".")[2].removesuffix("s"))
    return f"{name}: {things} there, {len(new):,} now; the first that differs: {first}"


def forget_refused(out: Path, manifest: Manifest, fresh: bool) -> None:
    """Remove the manifest of data that were refused before anything was made, and the folder if it is `fresh`."""
    if manifest.vocabulary is None and not manifest.segments and not (out / TOKENIZER).exists():
        (out / MANIFEST).unlink(missing_ok=True)
        if fresh:
            with suppress(OSError):  # somebody else has put something there
                out.rmdir()


def _new(out: Path, settings: dict[str, Any]) -> Manifest:
    manifest = Manifest(settings, segments=[])
    manifest.save(out)
    return manifest


def _remove(out: Path, names: re.Pattern[str]) -> None:
    for path in out.iterdir():
        if names.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tokenizer_whole(out: Path, manifest: Manifest) -> bool:
    try:
        return (
            manifest.vocabulary is not None
            and tokenizer_damage(out, manifest) is None
            and tokenizers.vocabulary(out / TOKENIZER) == manifest.vocabulary
        )
    except UserError:
        return False
