"""From text to token shards: the same bytes for any number of workers and after any number of kills."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from altup.data import tokenizer as tokenizers
from altup.data.disk import TEMPORARY, rename_folder_whole
from altup.data.faults import MEBIBYTE, Faults, Limits
from altup.data.shards import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    damage,
    token_type,
    write_shard,
)
from altup.data.sources import Chain, Reader, Source
from altup.data.workers import Workers
from altup.errors import UserError, check_range, check_whole

CHUNK = 1 << 20  # characters tokenised in one request, at most
PARTS_SAMPLED = 32
Watch = Callable[[str, float | None, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """What decides the result. Validation text is either given or held out of `sources` by document hash."""

    sources: Sequence[Source]
    validation: Sequence[Source] = ()
    validation_fraction: float = 0.01
    tokenizer: str | None = None
    vocab_size: int = 32_000
    sample_bytes: int = 50 * MEBIBYTE
    shard_tokens: int = 1 << 25
    on_error: str = "skip"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_range("validation_fraction", self.validation_fraction, 0, 1)
        for name in ("vocab_size", "sample_bytes", "shard_tokens"):
            check_whole(name, getattr(self, name), 1)
        Faults(self.on_error)
        if not self.sources:
            raise UserError("no source is given; name files, folders, hf:NAME:CONFIG:SPLIT, or use --embedded")

    def settings(self) -> dict[str, Any]:
        trained = {"vocab_size": self.vocab_size, "sample_bytes": self.sample_bytes}
        return {
            "train": Chain(self.sources).describe(),
            "validation": Chain(self.validation).describe() if self.validation else self.validation_fraction,
            "tokenizer": self.tokenizer or trained,
            "shard_tokens": self.shard_tokens,
            "on_error": self.on_error,
            "limits": vars(self.limits),
        }

    def held_out(self, text: str) -> bool:
        """Whether a document of `sources` belongs to validation; the same text always falls on the same side."""
        if self.validation or not self.validation_fraction:
            return False
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.validation_fraction * 2**64


def prepare(out: str | Path, recipe: Recipe, workers: int | None = None, watch: Watch | None = None) -> Manifest:
    """Make the folder `out`, or finish or mend it if it was begun with the same recipe.

    `watch(stage, fraction or None, documents, tokens)` is told how far it is.
    """
    out, watch = Path(out), watch or (lambda stage, fraction, documents, tokens: None)
    workers = usable_cores() if workers is None else workers
    check_whole("workers", workers, 1)
    settings = recipe.settings()
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        manifest = _begin(out, settings)
        if manifest.finished:
            return manifest
        manifest.vocabulary = _tokenizer(out, recipe, watch)
        manifest.save(out)
        with Workers(out / TOKENIZER, workers) as pool:
            passes = [("train", recipe.sources), ("validation", recipe.validation)]
            for name, sources in passes:
                if sources:
                    _run_pass(out, recipe, manifest, name, Chain(sources), pool, watch)
        if not manifest.shards("train"):
            reasons = ", ".join(f"{count} × {reason}" for reason, count in manifest.skipped().items())
            raise UserError(
                f"the sources hold no usable document ({reasons or 'they are empty'}); nothing to train on"
            )
        manifest.finished = True
        manifest.save(out)
    return manifest


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"another `altup prepare` is at work in {out}; wait for it or stop it") from None
    finally:
        os.close(handle)


def _begin(out: Path, settings: dict[str, Any]) -> Manifest:
    """The manifest to go on from: a new one, or the whole segments of the one that is there."""
    for left in out.glob(f"*{TEMPORARY}"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if not (out / MANIFEST).exists():
        if found := sorted(path.name for path in out.iterdir()):
            raise UserError(
                f"folder {out} holds other things ({', '.join(found[:3])}…); give a new or empty folder"
            )
        manifest = Manifest(settings, segments=[])
        manifest.save(out)
        return manifest
    manifest = Manifest.load(out)
    if differences := list(_differences(manifest.settings, settings)):
        raise UserError(
            f"folder {out} was made with other settings:\n  " + "\n  ".join(differences[:8]) + "\n"
            "give the same settings to go on, or another --out"
        )
    kept = []
    if manifest.vocabulary and _tokenizer_whole(out, manifest.vocabulary):
        itemsize = token_type(manifest.vocabulary.size).itemsize
        for segment in manifest.segments or []:
            if any(damage(out, shard, itemsize) for shard in segment["shards"].values()):
                break
            kept.append(segment)
    else:
        shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    manifest.finished = manifest.finished and bool(kept) and len(kept) == len(manifest.segments or [])
    manifest.segments = kept
    return manifest


def _tokenizer_whole(out: Path, vocabulary: tokenizers.Vocabulary) -> bool:
    try:
        return tokenizers.vocabulary(out / TOKENIZER) == vocabulary
    except UserError:
        return False


def _differences(there: Any, now: Any, name: str = "") -> Iterator[str]:
    """`name: there … now …` for every leaf that differs."""
    if isinstance(there, dict) and isinstance(now, dict):
        for key in sorted(there.keys() | now.keys()):
            yield from _differences(there.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif isinstance(there, list | tuple) and isinstance(now, list | tuple) and len(there) == len(now):
        for index, (old, new) in enumerate(zip(there, now, strict=True)):
            yield from _differences(old, new, f"{name}[{index}]")
    elif there != now:
        yield f"{name}: there {_short(there)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _tokenizer(out: Path, recipe: Recipe, watch: Watch) -> tokenizers.Vocabulary:
    folder, beside = out / TOKENIZER, out / (TOKENIZER + TEMPORARY)
    if not folder.exists():
        if recipe.tokenizer:
            watch("loading the tokenizer", None, 0, 0)
            tokenizers.take(recipe.tokenizer, beside)
        else:
            watch("reading a sample for the vocabulary", None, 0, 0)
            texts = list(_sample(recipe))
            watch(f"training a vocabulary of {recipe.vocab_size} pieces", None, len(texts), 0)
            tokenizers.save(tokenizers.train(texts, recipe.vocab_size), beside)
        rename_folder_whole(beside, folder)
    return tokenizers.vocabulary(folder)


def _sample(recipe: Recipe) -> Iterator[str]:
    """At most `sample_bytes` of training text, from up to 32 parts in turn.

    Of large sources every k-th document is taken, so that the sample reaches further in.
    """
    chain = Chain(recipe.sources)
    parts = chain.parts()
    step = -(-len(parts) // PARTS_SAMPLED)
    every = min(8, max(1, chain.text_bytes() // recipe.sample_bytes))
    faults = Faults(recipe.on_error, recipe.limits)
    readers = [iter(part.read(faults)) for part in parts[::step]]
    left = recipe.sample_bytes
    while readers and left > 0:
        for reader in list(readers):
            for _ in range(every - 1):
                next(reader, None)
            text = next(reader, None)
            if text is None:
                readers.remove(reader)
            elif not recipe.held_out(text):
                left -= len(text)
                yield text
            if left <= 0:
                return


@dataclass
class _Chunk:
    """Documents for one request, and the state of the pass after them."""

    counts: dict[str, tuple[int, int]]
    cursor: Any
    skipped: dict[str, Any]
    fraction: float | None
    end: bool


def _chunks(
    reader: Reader, faults: Faults, split_of: Callable[[str], str], characters: int
) -> Iterator[tuple[list[list[str]], _Chunk]]:
    def chunk(end: bool) -> tuple[list[list[str]], _Chunk]:
        counts = {split: (len(texts), sum(map(len, texts))) for split, texts in held.items()}
        return list(held.values()), _Chunk(counts, reader.cursor(), faults.state(), reader.fraction(), end)

    held: dict[str, list[str]] = {split: [] for split in SPLITS}
    size = 0
    for text in reader:
        held[split_of(text)].append(text)
        size += len(text)
        if size >= characters:
            yield chunk(end=False)
            held, size = {split: [] for split in SPLITS}, 0
    yield chunk(end=True)


def _run_pass(
    out: Path, recipe: Recipe, manifest: Manifest, name: str, source: Source, pool: Workers, watch: Watch
) -> None:
    """Read a source from where its last segment ended, and write and record segment after segment."""
    segments = manifest.segments
    assert segments is not None
    last: dict[str, Any] = next((s for s in reversed(segments) if s["pass"] == name), {})
    if last.get("end"):
        return
    faults = Faults(recipe.on_error, recipe.limits, last.get("skipped"))
    reader = source.read(faults, last.get("cursor"))

    def split_of(text: str) -> str:
        return "validation" if name == "validation" or recipe.held_out(text) else "train"

    shards = [shard for split in SPLITS for shard in manifest.shards(split)]
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    segment = _Segment()
    jobs = _chunks(reader, faults, split_of, min(CHUNK, recipe.shard_tokens))
    for arrays, chunk in pool.encode(jobs):
        segment.add(arrays, chunk)
        documents += sum(count for count, _ in chunk.counts.values())
        tokens += sum(map(len, arrays))
        watch(f"tokenising {name}", chunk.fraction, documents, tokens)
        if segment.tokens >= recipe.shard_tokens or chunk.end:
            shards_made = segment.write(out, manifest)
            segments.append(
                {
                    "pass": name,
                    "cursor": chunk.cursor,
                    "end": chunk.end,
                    "skipped": chunk.skipped,
                    "shards": shards_made,
                }
            )
            manifest.save(out)
            segment = _Segment()


class _Segment:
    """The tokens of both splits since the last shard."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._counts = {split: np.zeros(2, np.int64) for split in SPLITS}
        self.tokens = 0

    def add(self, arrays: list[np.ndarray], chunk: _Chunk) -> None:
        for split, ids in zip(SPLITS, arrays, strict=True):
            if len(ids):
                self._parts[split].append(ids)
            self._counts[split] += chunk.counts[split]
            self.tokens += len(ids)

    def write(self, out: Path, manifest: Manifest) -> dict[str, Shard]:
        made = {}
        for split, parts in self._parts.items():
            if parts:
                path = out / f"{split}-{len(manifest.shards(split)):05d}.bin"
                documents, characters = map(int, self._counts[split])
                made[split] = write_shard(path, parts, documents, characters)
        return made
