"""Preparing in parts, on many machines or one after the other, and merging them into what one call makes.

Beside the folder's own files there is `parts/` until they are merged:

    parts/plan.json     the settings, and the number of parts
    parts/tokenizer/    made by the part that comes first; the others wait for it
    parts/3-of-16/      a prepared folder of a part's files, whose manifest lists the chunks of every segment

A part is read from the first to the last of its files as the whole would be. Merging cuts the chunks of all parts,
one after the other, into the segments that the whole would have.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from altup.core.errors import UserError
from altup.core.files import Lock, make_durable
from altup.core.schema import differences
from altup.core.sealed_folders import read_sealed_json, write_sealed_json
from altup.data.bad_input import BadInput
from altup.data.prepare import (
    Recipe,
    Watch,
    finish,
    know_tokenizer,
    make_tokenizer,
    number_of_workers,
    place_tokenizer,
    tokenise,
)
from altup.data.prepared_folder import (
    PARTS,
    describe_difference,
    forget_refused,
    locked_folder,
    open_manifest,
    system_errors,
)
from altup.data.segments import Chunk, Part, SegmentWriter
from altup.data.shards import MANIFEST, SPLITS, TOKENIZER, Manifest, damage, token_type

PLAN = "plan.json"
MOST_PARTS = 10_000


def parse_part(text: str) -> Part:
    """`3/16`, as a user writes it."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    part = Part(*map(int, found.groups())) if found else Part(0, 0)
    if not 1 <= part.number <= part.count <= MOST_PARTS:
        raise UserError(
            f"--part {text!r}: give the part and the number of parts, as 3/16 (at most {MOST_PARTS:,})"
        )
    return part


def prepare_part(
    out: str | Path, recipe: Recipe, part: Part, workers: int | None = None, watch: Watch | None = None
) -> Manifest:
    """Make a part of the folder `out`, or finish or repair it if it was begun with the same recipe."""
    out, watch = Path(out), watch or (lambda stage, fraction, documents, tokens: None)
    workers = number_of_workers(workers)
    recipe = recipe.for_folder(out)
    settings = recipe.settings()
    folder, fresh = folder_of(out, part), not out.exists()
    with system_errors(out):
        _agree(out, settings, part)
        with locked_folder(folder):
            manifest = open_manifest(folder, {**settings, "part": str(part)})
            if manifest.finished:
                return manifest
            make = partial(_copy_tokenizer, out / PARTS / TOKENIZER, recipe, watch)
            try:
                place_tokenizer(folder / TOKENIZER, make)
            except UserError:
                _forget_refused_part(out, folder, manifest, fresh)
                raise
            know_tokenizer(folder / TOKENIZER, manifest)
            manifest.save(folder)
            tokenise(folder, recipe, manifest, workers, watch, part)
            manifest.finished = True
            manifest.save(folder)
    return manifest


def folder_of(out: Path, part: Part) -> Path:
    return out / PARTS / f"{part.number}-of-{part.count}"


def _agree(out: Path, settings: dict[str, Any], part: Part) -> None:
    """The first part writes the plan; the others must have the same. The part's folder is made with it, by which
    a part that is refused later knows whether others follow the plan."""
    if (out / MANIFEST).exists() and not (out / PARTS / PLAN).exists():
        raise UserError(f"{out} was begun without parts, or they are merged already; give another --out")
    with _plan_lock(out):
        if not (out / PARTS / PLAN).exists():
            write_sealed_json(out / PARTS / PLAN, {"parts": part.count, "settings": settings})
        planned, known = _plan(out)
        if planned != part.count:
            raise UserError(
                f"{out} is being prepared in {planned} parts, not {part.count}; give --part N/{planned}"
            )
        _refuse_others(out / PARTS, known, settings)
        make_durable(folder_of(out, part))


@contextmanager
def _plan_lock(out: Path) -> Iterator[None]:
    """Held by one part at a time. It goes with a plan that is forgotten, and must then be taken anew."""
    while True:
        with Lock(out / PARTS / (PLAN + ".lock")) as lock:
            lock.acquire(lambda: True)
            if not lock.lost:
                yield
                return


def _forget_refused_part(out: Path, folder: Path, manifest: Manifest, fresh: bool) -> None:
    """Remove what a part that was refused has begun and, where no other has begun, the plan, so that a corrected
    command finds no other settings."""
    with _plan_lock(out):
        forget_refused(folder, manifest, fresh=True)
        if any(path.is_dir() for path in (out / PARTS).iterdir()):
            return
        shutil.rmtree(out / PARTS)
        if fresh:
            with suppress(OSError):  # somebody else has put something there
                out.rmdir()


def _plan(out: Path) -> tuple[int, dict[str, Any]]:
    path = out / PARTS / PLAN
    try:
        content = read_sealed_json(path)
        return int(content["parts"]), dict(content["settings"])
    except FileNotFoundError:
        raise UserError(f"{out} holds no parts to merge; make them with --part 1/N, --part 2/N, …") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {path.parent} and prepare again") from None


def _refuse_others(place: Path, known: dict[str, Any], settings: dict[str, Any]) -> None:
    lines = [describe_difference(*one) for one in list(differences(known, settings))[:8]]
    if lines:
        raise UserError(
            f"{place} was begun with other settings:\n  " + "\n  ".join(lines) + "\n"
            f"give the same settings to every part, or another --out; to begin anew remove {place}"
        )


def _copy_tokenizer(shared: Path, recipe: Recipe, watch: Watch, folder: Path) -> None:
    """Every part has the tokenizer of the first one that came."""
    with Lock(shared.with_name(f"{TOKENIZER}.lock")) as lock:
        if not lock.acquire():
            watch("waiting for the part that makes the tokenizer", None, 0, 0)
            lock.acquire(lambda: True)
        place_tokenizer(shared, partial(make_tokenizer, recipe=recipe, watch=watch))
    shutil.copytree(shared, folder)


def merge_parts(out: str | Path, settings: dict[str, Any] | None = None, watch: Watch | None = None) -> Manifest:
    """Make of all parts the folder that one call makes, byte for byte, and remove them. Repeat a killed merge."""
    out, watch = Path(out), watch or (lambda stage, fraction, documents, tokens: None)
    if not out.is_dir():
        raise UserError(f"{out} holds no parts to merge; make them with --part 1/N, --part 2/N, …")
    with system_errors(out), locked_folder(out):
        done = Manifest.load(out) if (out / MANIFEST).exists() else None
        if done and done.finished:
            shutil.rmtree(out / PARTS, ignore_errors=True)  # a kill may have left them
            return done
        count, planned = _plan(out)
        if settings is not None:
            _refuse_others(out / PARTS, planned, settings)
        parts = _finished_parts(out, count, planned)
        manifest = open_manifest(out, planned, beside=PARTS)
        place_tokenizer(out / TOKENIZER, partial(shutil.copytree, folder_of(out, Part(1, count)) / TOKENIZER))
        know_tokenizer(out / TOKENIZER, manifest)
        if manifest.tokenizer != parts[0][1].tokenizer:
            raise UserError(f"the tokenizer of {parts[0][0]} is damaged; run that part again, then merge again")
        manifest.save(out)
        _cut(out, parts, manifest, planned["shard_tokens"], watch)
        finish(out, manifest)
        shutil.rmtree(out / PARTS)
    return manifest


def _finished_parts(out: Path, count: int, settings: dict[str, Any]) -> list[tuple[Path, Manifest]]:
    """Folder and manifest of every part; UserError unless all are there, finished, and alike."""
    parts: list[tuple[Path, Manifest]] = []
    wanting = []
    for number in range(1, count + 1):
        part = Part(number, count)
        folder = folder_of(out, part)
        if not (folder / MANIFEST).exists():
            wanting.append(f"{part} is missing")
            continue
        manifest = Manifest.load(folder)
        if not manifest.finished:
            wanting.append(f"{part} is not finished")
        _refuse_others(folder, manifest.settings, {**settings, "part": str(part)})
        if parts and manifest.tokenizer != parts[0][1].tokenizer:
            raise UserError(
                f"{folder} was made with another tokenizer than {parts[0][0]}; "
                f"remove it and run --part {part} again"
            )
        parts.append((folder, manifest))
    if wanting:
        more = f" and {len(wanting) - 8} more" if len(wanting) > 8 else ""
        raise UserError(f"not all parts of {out} are there: {', '.join(wanting[:8])}{more}; run them, then merge")
    return parts


def _cut(
    out: Path, parts: list[tuple[Path, Manifest]], manifest: Manifest, shard_tokens: int, watch: Watch
) -> None:
    """Cut the chunks of all parts into the segments of the whole; those that a killed merge has made are kept."""
    kept, manifest.segments = manifest.segments or [], []
    total = sum(shard.tokens for _, part in parts for split in SPLITS for shard in part.shards(split))
    documents = tokens = 0
    for name in ("train", "validation"):
        writer = SegmentWriter(out, manifest, name, shard_tokens, kept=[s for s in kept if s["pass"] == name])
        for arrays, chunk in _chunks(parts, name):
            writer.add(arrays, chunk)
            documents += sum(count for count, _ in chunk.counts.values())
            tokens += sum(map(len, arrays))
            watch(f"merging {name}", tokens / total if total else None, documents, tokens)


def _chunks(parts: list[tuple[Path, Manifest]], name: str) -> Iterator[tuple[list[np.ndarray], Chunk]]:
    """The chunks of a pass, part after part, with their tokens; bad input is counted from the first part on."""
    before: dict[str, Any] = {}
    for folder, manifest in parts:
        skipped = before
        for segment in manifest.segments or []:
            if segment["pass"] != name:
                continue
            arrays = _tokens(folder, manifest, segment)
            starts = [0] * len(SPLITS)
            for index, chunk in enumerate(segment["chunks"]):
                stops = [start + length for start, length in zip(starts, chunk["tokens"], strict=True)]
                ids = [array[start:stop] for array, start, stop in zip(arrays, starts, stops, strict=True)]
                bad_input = BadInput(state=before)
                bad_input.add(chunk["skipped"])
                skipped, starts = bad_input.state(), stops
                counts = {split: tuple(pair) for split, pair in zip(SPLITS, chunk["counts"], strict=True)}
                end = segment["end"] and index == len(segment["chunks"]) - 1
                yield ids, Chunk(counts, chunk["cursor"], skipped, end)
        before = skipped


def _tokens(folder: Path, manifest: Manifest, segment: dict[str, Any]) -> list[np.ndarray]:
    """The tokens of a part's segment for each split, compared with their hash."""
    assert manifest.vocabulary is not None
    kind = token_type(manifest.vocabulary.size)
    arrays = []
    for split in SPLITS:
        shard = segment["shards"].get(split)
        if shard and (wrong := damage(folder, shard, kind.itemsize)):
            raise UserError(
                f"{folder / shard.file} {wrong}; run that part again, which repairs it, then merge again"
            )
        arrays.append(np.memmap(folder / shard.file, kind, "r") if shard else np.empty(0, kind))
    return arrays
