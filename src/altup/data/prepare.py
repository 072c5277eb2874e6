"""From text to token shards: the same bytes for any number of workers and after any number of kills."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from altup.core.errors import UserError, check_range, check_whole, named
from altup.core.files import TEMPORARY, rename_folder
from altup.core.hardware import usable_cores
from altup.data import tokenizer as tokenizers
from altup.data.bad_input import MEBIBYTE, BadInput, Limits
from altup.data.held_out import choose_fraction, document_hash
from altup.data.prepared_folder import forget_refused, locked_folder, open_manifest, system_errors
from altup.data.segments import Part, Pass, SegmentWriter
from altup.data.shards import SPLITS, TOKENIZER, Manifest, hashes
from altup.data.sources import Chain, Source
from altup.data.tokenizer_pool import TokenizerPool

CHUNK = 1 << 20  # characters tokenised in one request, at most
SAMPLED_FILES = 32  # open at a time
LARGEST_STEP = 8
MOST_WORKERS = 1_000  # each is a process
Watch = Callable[[str, float | None, int, int], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that the prepared data depend on. Validation text is given, or held out by document hash.

    Without a `validation_fraction` or a `vocab_size` they are chosen: 0.01 and 32,000, and for little text more to
    hold out and a smaller vocabulary.
    """

    sources: Sequence[Source]
    validation: Sequence[Source] = ()
    validation_fraction: float | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    sample_bytes: int = 50 * MEBIBYTE
    shard_tokens: int = 1 << 25
    on_error: str = "skip"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.validation_fraction is not None:
            check_range("validation_fraction", self.validation_fraction, 0, 1)
        if not self.tokenizer and self.vocab_size is not None:
            check_whole("vocab_size", self.vocab_size, tokenizers.LEAST_VOCABULARY, tokenizers.MOST_VOCABULARY)
        for name in ("sample_bytes", "shard_tokens"):
            check_whole(name, getattr(self, name), 1)
        BadInput(self.on_error)
        if not self.sources:
            raise UserError("no source is given; name files, folders, hf:NAME:CONFIG:SPLIT, or use --embedded")

    def settings(self) -> dict[str, Any]:
        trained = {"vocab_size": self.vocab_size or tokenizers.PIECES, "sample_bytes": self.sample_bytes}
        return {
            "train": Chain(self.sources).describe(),
            "validation": Chain(self.validation).describe() if self.validation else self.validation_fraction,
            "tokenizer": self.tokenizer or trained,
            "shard_tokens": self.shard_tokens,
            "on_error": self.on_error,
            "limits": vars(self.limits),
        }

    def passes(self) -> dict[str, Sequence[Source]]:
        """What is read one after the other."""
        passes = {"train": self.sources, "validation": self.validation}
        return {name: sources for name, sources in passes.items() if sources}

    def held_out(self, text: str) -> bool:
        """Whether a document of `sources` belongs to validation; the same text always falls on the same side."""
        if self.validation or not self.validation_fraction:
            return False
        return document_hash(text) < self.validation_fraction * 2**64

    def for_folder(self, out: Path) -> Recipe:
        """The recipe with the part to hold out, if that is to be chosen."""
        if self.validation or self.validation_fraction is not None:
            return self
        chosen = choose_fraction(out, self.sources, self.on_error, self.limits)
        return replace(self, validation_fraction=chosen)


def number_of_workers(given: int | None) -> int:
    """As many as were asked for, or one a core."""
    workers = usable_cores() if given is None else given
    check_whole("workers", workers, 1, MOST_WORKERS)
    return workers


def prepare(out: str | Path, recipe: Recipe, workers: int | None = None, watch: Watch | None = None) -> Manifest:
    """Make the folder `out`, or finish or repair it if it was begun with the same recipe.

    Progress goes to `watch(stage, fraction or None, documents, tokens)`.
    """
    out, watch = Path(out), watch or (lambda stage, fraction, documents, tokens: None)
    workers = number_of_workers(workers)
    recipe = recipe.for_folder(out)
    settings = recipe.settings()
    with system_errors(out), locked_folder(out) as fresh:
        manifest = open_manifest(out, settings)
        _check_pieces(out, recipe, manifest)
        if manifest.finished:
            return manifest
        try:
            _settle_tokenizer(out, recipe, manifest, watch)
        except UserError:
            forget_refused(out, manifest, fresh)
            raise
        manifest.save(out)
        tokenise(out, recipe, manifest, workers, watch)
        finish(out, manifest)
    return manifest


def tokenise(
    out: Path, recipe: Recipe, manifest: Manifest, workers: int, watch: Watch, part: Part | None = None
) -> None:
    """Write the shards of all sources, or of one part of them, that `manifest` does not name yet."""
    with TokenizerPool(out / TOKENIZER, workers) as pool:
        for name, sources in recipe.passes().items():
            _run_pass(out, recipe, manifest, name, Chain(sources), pool, watch, part)


def finish(out: Path, manifest: Manifest) -> None:
    """Refuse data without a training shard; else say in the manifest that all is there."""
    if not manifest.shards("train"):
        reasons = ", ".join(f"{count} × {reason}" for reason, count in manifest.skipped().items())
        raise UserError(
            f"the sources hold no usable document ({reasons or 'they are empty'}); nothing to train on"
        )
    manifest.finished = True
    manifest.save(out)


def _check_pieces(out: Path, recipe: Recipe, manifest: Manifest) -> None:
    """A vocabulary whose size was chosen is not the one that is asked for now."""
    if recipe.tokenizer or recipe.vocab_size is None or manifest.vocabulary is None:
        return
    if (pieces := manifest.vocabulary.size - len(tokenizers.SENTINELS)) != recipe.vocab_size:
        raise UserError(
            f"{named('vocab_size', recipe.vocab_size)}: the vocabulary in {out} has {pieces:,} pieces, as many "
            "as suit the "
            "text; remove it, or give another --out"
        )


def _settle_tokenizer(out: Path, recipe: Recipe, manifest: Manifest, watch: Watch) -> None:
    """Make the tokenizer if it is missing; shards made with another tokenizer are dropped."""
    place_tokenizer(out / TOKENIZER, lambda folder: make_tokenizer(folder, recipe, watch))
    know_tokenizer(out / TOKENIZER, manifest)


def place_tokenizer(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder with a tokenizer, if it is missing: whole or not at all."""
    beside = folder.with_name(folder.name + TEMPORARY)
    if folder.exists():
        return
    try:
        shutil.rmtree(beside, ignore_errors=True)  # left by a kill
        make(beside)
        rename_folder(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def know_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Note a tokenizer in the manifest; shards made with another one are dropped."""
    vocabulary = tokenizers.vocabulary(folder)
    if vocabulary != manifest.vocabulary:
        manifest.segments = []
    manifest.vocabulary, manifest.tokenizer = vocabulary, hashes(folder)


def make_tokenizer(folder: Path, recipe: Recipe, watch: Watch) -> None:
    if recipe.tokenizer:
        watch("loading the tokenizer", None, 0, 0)
        tokenizers.take(recipe.tokenizer, folder)
    else:
        watch("reading a sample for the vocabulary", None, 0, 0)
        texts = list(sample_text(recipe))
        size = f" of {recipe.vocab_size:,} pieces" if recipe.vocab_size else ""  # else chosen by the text
        watch(f"training a vocabulary{size}", None, len(texts), 0)
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


def _run_pass(
    out: Path,
    recipe: Recipe,
    manifest: Manifest,
    name: str,
    source: Chain,
    pool: TokenizerPool,
    watch: Watch,
    part: Part | None,
) -> None:
    """Read a source from where its last segment ended, and write and record segment after segment."""
    last: dict[str, Any] = next((s for s in reversed(manifest.segments or []) if s["pass"] == name), {})
    if last.get("end"):
        return
    bad_input = BadInput(recipe.on_error, recipe.limits, last.get("skipped"))
    reading = Pass(source, last.get("cursor"), bad_input, part)

    def split_of(text: str) -> str:
        return "validation" if name == "validation" or recipe.held_out(text) else "train"

    shards = [shard for split in SPLITS for shard in manifest.shards(split)]
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    segments = SegmentWriter(out, manifest, name, recipe.shard_tokens, keeps_chunks=part is not None)
    for arrays, chunk in pool.encode(reading.chunks(split_of, min(CHUNK, recipe.shard_tokens))):
        segments.add(arrays, chunk)
        documents += sum(count for count, _ in chunk.counts.values())
        tokens += sum(map(len, arrays))
        watch(f"tokenising {name}", chunk.fraction, documents, tokens)
    segments.write()
