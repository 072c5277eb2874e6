"""Token shards: hashed files of token ids, and the memory-mapped stream that training reads.

A prepared folder holds `manifest.json`, `tokenizer/`, and for each split `train-00000.bin`, `train-00001.bin`, …:
bare little-endian uint16 ids (uint32 if the vocabulary needs it), documents one after the other without eos.
"""

from __future__ import annotations

import hashlib
import random
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from altup.core.errors import UserError, check_choice
from altup.core.files import (
    atomic_write,
    check_file_name,
    check_relative_path,
    files_below,
    read_mapping,
    sha256_of,
)
from altup.core.sealed_folders import read_sealed_json, write_sealed_json
from altup.data import tokenizer as tokenizers
from altup.data.tokenizer import Vocabulary

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
FORMAT = 2
SPLITS = ("train", "validation")
SAMPLE = 1 << 30  # bytes that `verify` reads of each split, where a sample is enough
MAPPED = 512  # shards kept open at a time, below the usual limit on open files
AGAIN = "run the same `altup prepare` command again; it replaces what is missing or damaged"


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    documents: int
    characters: int
    sha256: str


def token_type(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(path: Path, parts: Sequence[np.ndarray], documents: int, characters: int) -> Shard:
    ids = np.concatenate(parts)
    atomic_write(path, ids.data.cast("B"))
    return Shard(path.name, len(ids), documents, characters, hashlib.sha256(ids.data).hexdigest())


@dataclass
class Manifest:
    """The contents of a prepared folder; rewritten after every finished segment of the source.

    A segment is a run of documents: `{"pass", "cursor", "end", "skipped", "shards": {split: Shard}}`, with the
    place in the source where the next one begins, so that preparing can continue after it.
    """

    settings: dict[str, Any]
    vocabulary: Vocabulary | None = None
    segments: list[dict[str, Any]] | None = None
    finished: bool = False
    tokenizer: dict[str, str] = field(default_factory=dict)  # sha256 of each file of tokenizer/

    def save(self, folder: Path) -> None:
        content = {
            "format": FORMAT,
            "finished": self.finished,
            "settings": self.settings,
            "vocabulary": self.vocabulary and self.vocabulary.to_json(),
            "tokenizer": self.tokenizer,
            "segments": [
                {**segment, "shards": {split: asdict(shard) for split, shard in segment["shards"].items()}}
                for segment in self.segments or []
            ],
        }
        write_sealed_json(folder / MANIFEST, content)

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            if (found := read_mapping(path)["format"]) != FORMAT:
                raise UserError(f"{path} is of format {found}, this altup reads {FORMAT}; prepare again")
            content = read_sealed_json(path)
            vocabulary = content["vocabulary"] and Vocabulary.from_json(content["vocabulary"])
            segments = [
                {**segment, "shards": {split: Shard(**shard) for split, shard in segment["shards"].items()}}
                for segment in content["segments"]
            ]
            for segment in segments:
                for shard in segment["shards"].values():
                    check_file_name(shard.file, str(path))
            for name in content["tokenizer"]:
                check_relative_path(name, str(path))
            return cls(content["settings"], vocabulary, segments, content["finished"], dict(content["tokenizer"]))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{folder} holds no prepared data; "
                f"make it with `altup prepare SOURCE --out {shlex.quote(str(folder))}`"
            ) from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from None
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged, or not a manifest of altup ({error}); prepare into another folder"
            ) from None

    def shards(self, split: str) -> list[Shard]:
        return [segment["shards"][split] for segment in self.segments or [] if split in segment["shards"]]

    def skipped(self) -> dict[str, int]:
        """Bad input by reason. A segment's counts run on from the start of its pass, so the last hold all."""
        last = {segment["pass"]: segment["skipped"] for segment in self.segments or []}
        counts: dict[str, int] = {}
        for reasons in last.values():
            for reason, seen in reasons.items():
                counts[reason] = counts.get(reason, 0) + seen["count"]
        return counts


def damage(folder: Path, shard: Shard, itemsize: int, hashed: bool = True) -> str | None:
    """What is wrong with a shard; None if nothing is."""
    path = folder / shard.file
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != shard.tokens * itemsize:
        return f"has {size} bytes instead of {shard.tokens * itemsize}"
    if hashed and sha256_of(path) != shard.sha256:
        return "has other content than was written"
    return None


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files_below(folder)}


def tokenizer_damage(folder: Path, manifest: Manifest) -> Path | None:
    """The first file of the tokenizer that is missing or not as it was written; files added later are no harm."""
    for name, sha256 in manifest.tokenizer.items():
        path = folder / TOKENIZER / name
        if not path.is_file() or sha256_of(path) != sha256:
            return path
    return None


def verify(folder: str | Path, most_bytes: int | None = None) -> Manifest:
    """Read every byte of a prepared folder and compare with its manifest; `UserError` at the first difference.

    With `most_bytes` a random sample of its shards is read, about so large in each split and at least one of it;
    the others are compared by their sizes.
    """
    folder = Path(folder)
    manifest = _finished(folder)
    vocabulary = manifest.vocabulary
    assert vocabulary is not None
    if wrong_file := tokenizer_damage(folder, manifest):
        raise UserError(f"{wrong_file} is missing or not the one the shards were made with; {AGAIN}")
    _check_vocabulary(folder, vocabulary)
    itemsize = token_type(vocabulary.size).itemsize
    shards = [shard for split in SPLITS for shard in manifest.shards(split)]
    hashed = set(shards) if most_bytes is None else _sample(manifest, most_bytes // itemsize)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda shard: damage(folder, shard, itemsize, shard in hashed), shards)
        for shard, wrong in zip(shards, found, strict=True):
            if wrong:
                raise UserError(f"shard {folder / shard.file} {wrong}; {AGAIN}")
    return manifest


def _sample(manifest: Manifest, most_tokens: int) -> set[Shard]:
    """Shards of `most_tokens` tokens or a little more, another choice every time; at least one of each split."""
    draw = random.Random()
    chosen: set[Shard] = set()
    for split in SPLITS:
        shards, left = manifest.shards(split), most_tokens
        for shard in draw.sample(shards, len(shards)):
            chosen.add(shard)
            left -= shard.tokens
            if left <= 0:
                break
    return chosen


def _finished(folder: Path) -> Manifest:
    manifest = Manifest.load(folder)
    if not manifest.finished or manifest.vocabulary is None:
        raise UserError(f"preparing {folder} was not finished; {AGAIN}")
    return manifest


def _check_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """UserError where the tokenizer says otherwise than the manifest which token is which."""
    if tokenizers.vocabulary(folder / TOKENIZER) != vocabulary:
        raise UserError(f"{folder / MANIFEST} names other tokens than {folder / TOKENIZER} has; {AGAIN}")


class TokenStream:
    """All tokens of a split as one long array, memory-mapped. Cheap to open: sizes are checked, not hashes."""

    def __init__(self, folder: str | Path, split: str = "train"):
        check_choice("split", split, SPLITS)
        self.folder, self.split = Path(folder), split
        manifest = _finished(self.folder)
        assert manifest.vocabulary is not None
        self.vocabulary = manifest.vocabulary
        _check_vocabulary(self.folder, self.vocabulary)
        self.shards = manifest.shards(split)
        self._type = token_type(self.vocabulary.size)
        for shard in self.shards:
            if wrong := damage(self.folder, shard, self._type.itemsize, hashed=False):
                raise UserError(f"shard {self.folder / shard.file} {wrong}; {AGAIN}")
        self._ends = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        self._mapped = lru_cache(MAPPED)(self._map)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sha256(self) -> str:
        """The identity of the split's tokens."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def _map(self, index: int) -> np.ndarray:
        return np.memmap(self.folder / self.shards[index].file, self._type, "r")

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1."""
        pieces = []
        while start < stop:
            index = int(np.searchsorted(self._ends, start, side="right")) - 1
            end = min(stop, int(self._ends[index + 1]))
            pieces.append(self._mapped(index)[start - self._ends[index] : end - self._ends[index]])
            start = end
        return np.concatenate(pieces) if pieces else np.empty(0, self._type)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """`[n, length]` tokens, row i from place `starts[i]` on. One copy a shard, whatever n."""
        rows = np.empty((len(starts), length), self._type)
        home = np.searchsorted(self._ends, starts, side="right") - 1
        inside = starts + length <= self._ends[home + 1]
        for index in np.unique(home[inside]):
            mine = inside & (home == index)
            views = np.lib.stride_tricks.sliding_window_view(self._mapped(int(index)), length)
            rows[mine] = views[starts[mine] - self._ends[index]]
        for row in np.flatnonzero(~inside):
            rows[row] = self.read(int(starts[row]), int(starts[row]) + length)
        if rows.size and rows.max() >= self.vocabulary.size:
            self._refuse_unknown(rows, home)
        return rows

    def _refuse_unknown(self, rows: np.ndarray, home: np.ndarray) -> NoReturn:
        """Ids that no token has, in rows that begin in the shards `home`."""
        row, column = np.argwhere(rows >= self.vocabulary.size)[0]
        raise UserError(
            f"shard {self.folder / self.shards[home[row]].file} has the id {rows[row, column]:,}, but the "
            f"vocabulary only {self.vocabulary.size:,} tokens; {AGAIN}"
        )
