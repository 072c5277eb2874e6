"""From a source to shards: files are read in chunks, chunks are collected to segments, and segments are written.

A chunk is what is tokenised at a time; where it begins depends on nothing but its file. A segment is a run of
chunks with at least `shard_tokens` tokens, written as one shard a split. So any part of the files can be tokenised
by itself, and its chunks can be cut into the segments of the whole later (`parts.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from altup.data.bad_input import BadInput
from altup.data.shards import SPLITS, Manifest, Shard, write_shard
from altup.data.sources import Chain


@dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `count`: consecutive files of about the same amount of text."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def files(self, sizes: Sequence[int]) -> range:
        """The indices of its files, given the size of each: those whose middle lies in it."""
        ends = list(accumulate(_weights(sizes)))
        middles = [(start + end) / 2 / ends[-1] for start, end in pairwise([0, *ends])]
        mine = [index for index, middle in enumerate(middles) if int(middle * self.count) + 1 == self.number]
        return range(mine[0], mine[-1] + 1) if mine else range(0)


def _weights(sizes: Sequence[int]) -> list[float]:
    """The sizes of files, with their mean where one is not known (0)."""
    known = [size for size in sizes if size] or [1]
    mean = sum(known) / len(known)
    return [size or mean for size in sizes]


@dataclass
class Chunk:
    """Documents of one file for one request, and the state of the pass after them.

    `counts` are the documents and characters of each split.
    """

    counts: dict[str, tuple[int, int]]
    cursor: Any
    skipped: dict[str, Any]
    end: bool
    fraction: float | None = None


class Pass:
    """A source, file by file from a cursor on, in chunks. Where chunks begin depends on nothing but the file."""

    def __init__(self, source: Chain, cursor: Any, bad_input: BadInput, part: Part | None):
        self.source, self.cursor, self.bad_input = source, cursor, bad_input
        self._starts, sizes = zip(*source.files(), strict=True)
        self._files = part.files(sizes) if part else range(len(sizes))
        self._ends = [*self._starts[1:], [len(source.sources), None]]  # the cursor at the end of each file
        self._before = [0.0, *accumulate(_weights(sizes))]  # text before each file
        first = self._files.start if cursor is None else source.file_of(cursor)
        self._left = range(first, self._files.stop)

    def chunks(self, split_of: Callable[[str], str], characters: int) -> Iterator[tuple[list[list[str]], Chunk]]:
        for file in self._left:
            resumed = self.cursor is not None and file == self._left.start
            start = self.cursor if resumed else self._starts[file]
            reader = self.source.read(self.bad_input, start, one_file=True)
            held: dict[str, list[str]] = {split: [] for split in SPLITS}
            size = 0
            for text in reader:
                held[split_of(text)].append(text)
                size += len(text)
                if size >= characters:
                    yield list(held.values()), self._chunk(held, reader.cursor(), file, reader.fraction())
                    held, size = {split: [] for split in SPLITS}, 0
            if size or file == self._files[-1]:
                yield list(held.values()), self._chunk(held, self._ends[file], file + 1, 0.0)

    def _chunk(self, held: dict[str, list[str]], cursor: Any, file: int, within: float | None) -> Chunk:
        counts = {split: (len(texts), sum(map(len, texts))) for split, texts in held.items()}
        end = file == len(self._starts)
        return Chunk(counts, cursor, self.bad_input.state(), end, self._fraction(file, within))

    def _fraction(self, file: int, within: float | None) -> float | None:
        """Of the text of this part, about."""
        if within is None and len(self._files) == 1:
            return None
        first, stop = self._before[self._files.start], self._before[self._files.stop]
        here = self._before[min(file + 1, len(self._starts))] - self._before[file]
        return min(1.0, (self._before[file] - first + (within or 0.0) * here) / (stop - first))


class SegmentWriter:
    """Collects chunks to segments of at least `shard_tokens` tokens, and writes each as a shard a split.

    With `keeps_chunks` a segment lists its chunks, so that they can be cut into other segments later. The first
    segments, which are `kept` from before, are not written again.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        name: str,
        shard_tokens: int,
        keeps_chunks: bool = False,
        kept: Sequence[dict[str, Any]] = (),
    ):
        self._out, self._manifest, self._name = out, manifest, name
        self._shard_tokens, self._keeps_chunks, self._kept = shard_tokens, keeps_chunks, deque(kept)
        self._clear()

    def _clear(self) -> None:
        self._arrays: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._chunks: list[tuple[list[int], Chunk]] = []
        self._tokens = 0

    def add(self, arrays: Sequence[np.ndarray], chunk: Chunk) -> None:
        for split, ids in zip(SPLITS, arrays, strict=True):
            if len(ids):
                self._arrays[split].append(ids)
        self._chunks.append(([len(ids) for ids in arrays], chunk))
        self._tokens += sum(map(len, arrays))
        if self._tokens >= self._shard_tokens or chunk.end:
            self.write()

    def write(self) -> None:
        """Write and record what has been added since the last segment."""
        if not self._chunks:
            return
        assert self._manifest.segments is not None
        if self._kept:
            self._manifest.segments.append(self._kept.popleft())
            self._clear()
            return
        last = self._chunks[-1][1]
        segment = {
            "pass": self._name,
            "cursor": last.cursor,
            "end": last.end,
            "skipped": last.skipped,
            "shards": {split: self._shard(split, parts) for split, parts in self._arrays.items() if parts},
        }
        if self._keeps_chunks:
            segment["chunks"] = [
                {"tokens": tokens, "counts": list(c.counts.values()), "cursor": c.cursor, "skipped": c.skipped}
                for tokens, c in self._chunks
            ]
        self._manifest.segments.append(segment)
        self._manifest.save(self._out)
        self._clear()

    def _shard(self, split: str, parts: list[np.ndarray]) -> Shard:
        path = self._out / f"{split}-{len(self._manifest.shards(split)):05d}.bin"
        documents, characters = (sum(chunk.counts[split][i] for _, chunk in self._chunks) for i in (0, 1))
        return write_shard(path, parts, documents, characters)
