"""From text to token shards: the same bytes for any number of workers and after any number of kills."""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from altup.core.errors import UserError, check_range, check_whole
from altup.core.files import TEMPORARY, rename_folder
from altup.core.hardware import usable_cores
from altup.data import tokenizer as tokenizers
from altup.data.bad_input import MEBIBYTE, BadInput, Limits
from altup.data.prepared_folder import locked_folder, open_manifest, system_errors
from altup.data.shards import SPLITS, TOKENIZER, Manifest, Shard, hashes, write_shard
from altup.data.sources import Chain, Reader, Source
from altup.data.tokenizer_pool import TokenizerPool

CHUNK = 1 << 20  # characters tokenised in one request, at most
SAMPLED_FILES = 32  # open at a time
LARGEST_STEP = 8
Watch = Callable[[str, float | None, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that the prepared data depend on. Validation text is given, or held out by document hash."""

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
        if not self.tokenizer:
            check_whole("vocab_size", self.vocab_size, tokenizers.LEAST_VOCABULARY)
        for name in ("sample_bytes", "shard_tokens"):
            check_whole(name, getattr(self, name), 1)
        BadInput(self.on_error)
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
    """Make the folder `out`, or finish or repair it if it was begun with the same recipe.

    Progress goes to `watch(stage, fraction or None, documents, tokens)`.
    """
    out, watch = Path(out), watch or (lambda stage, fraction, documents, tokens: None)
    workers = usable_cores() if workers is None else workers
    check_whole("workers", workers, 1)
    settings = recipe.settings()
    with system_errors(out), locked_folder(out):
        manifest = open_manifest(out, settings)
        if manifest.finished:
            return manifest
        _settle_tokenizer(out, recipe, manifest, watch)
        manifest.save(out)
        with TokenizerPool(out / TOKENIZER, workers) as pool:
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


def _settle_tokenizer(out: Path, recipe: Recipe, manifest: Manifest, watch: Watch) -> None:
    """Make the tokenizer if it is missing; shards made with another tokenizer are dropped."""
    folder, beside = out / TOKENIZER, out / (TOKENIZER + TEMPORARY)
    if not folder.exists():
        try:
            _make_tokenizer(beside, recipe, watch)
            rename_folder(beside, folder)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    vocabulary = tokenizers.vocabulary(folder)
    if vocabulary != manifest.vocabulary:
        manifest.segments = []
    manifest.vocabulary, manifest.tokenizer = vocabulary, hashes(folder)


def _make_tokenizer(folder: Path, recipe: Recipe, watch: Watch) -> None:
    if recipe.tokenizer:
        watch("loading the tokenizer", None, 0, 0)
        tokenizers.take(recipe.tokenizer, folder)
    else:
        watch("reading a sample for the vocabulary", None, 0, 0)
        texts = list(sample_text(recipe))
        watch(f"training a vocabulary of {recipe.vocab_size} pieces", None, len(texts), 0)
        tokenizers.save(tokenizers.train(texts, recipe.vocab_size), folder)


def sample_text(recipe: Recipe) -> Iterator[str]:
    """The text a vocabulary is trained on: about `sample_bytes` of training text, the same on every run.

    Documents come from up to 32 files in turn, spread over all of them; when a file ends, the next one takes its
    place. In large sources only every k-th document is taken, so that the sample reaches further into the files.
    If that does not fill it, the remaining documents follow in k - 1 further passes.
    """
    chain = Chain(recipe.sources)
    parts = chain.parts()
    stride = -(-len(parts) // SAMPLED_FILES)
    spread = [part for first in range(stride) for part in parts[first::stride]]
    every = min(LARGEST_STEP, max(1, chain.text_bytes() // recipe.sample_bytes))
    left = recipe.sample_bytes
    for offset in range(every):
        bad_input = BadInput(recipe.on_error, recipe.limits)
        waiting = (islice(part.read(bad_input), offset, None, every) for part in spread)
        readers = deque(islice(waiting, SAMPLED_FILES))
        while readers:
            reader = readers.popleft()
            text = next(reader, None)
            if text is None:
                readers.extend(islice(waiting, 1))
                continue
            readers.append(reader)
            if not recipe.held_out(text):
                left -= len(text.encode())
                yield text
                if left <= 0:
                    return
    if left == recipe.sample_bytes:
        reasons = (
            f"{bad_input.summary()}; --on-error stop says more" if bad_input.state() else "empty, or all held out"
        )
        raise UserError(f"the sources hold no text to train a vocabulary on: {reasons}")


@dataclass
class _Chunk:
    """Documents for one request, and the state of the pass after them."""

    counts: dict[str, tuple[int, int]]
    cursor: Any
    skipped: dict[str, Any]
    fraction: float | None
    end: bool


def _chunks(
    reader: Reader, bad_input: BadInput, split_of: Callable[[str], str], characters: int
) -> Iterator[tuple[list[list[str]], _Chunk]]:
    def chunk(end: bool) -> tuple[list[list[str]], _Chunk]:
        counts = {split: (len(texts), sum(map(len, texts))) for split, texts in held.items()}
        return list(held.values()), _Chunk(counts, reader.cursor(), bad_input.state(), reader.fraction(), end)

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
    out: Path, recipe: Recipe, manifest: Manifest, name: str, source: Source, pool: TokenizerPool, watch: Watch
) -> None:
    """Read a source from where its last segment ended, and write and record segment after segment."""
    segments = manifest.segments
    assert segments is not None
    last: dict[str, Any] = next((s for s in reversed(segments) if s["pass"] == name), {})
    if last.get("end"):
        return
    bad_input = BadInput(recipe.on_error, recipe.limits, last.get("skipped"))
    reader = source.read(bad_input, last.get("cursor"))

    def split_of(text: str) -> str:
        return "validation" if name == "validation" or recipe.held_out(text) else "train"

    shards = [shard for split in SPLITS for shard in manifest.shards(split)]
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    segment = _Segment()
    jobs = _chunks(reader, bad_input, split_of, min(CHUNK, recipe.shard_tokens))
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
