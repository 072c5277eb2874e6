"""Where documents come from: local files, Hugging Face datasets, the embedded corpus.

A source names and describes a text collection; reading it gives documents in a fixed order, and reading can
go on from a cursor taken after any document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from altup.core.errors import UserError
from altup.data.bad_input import BadInput


class Reader(Protocol):
    """One pass over a source, document by document."""

    def __iter__(self) -> Iterator[str]: ...

    def cursor(self) -> Any:
        """JSON-able place after the last document given; `Source.read` goes on from there."""

    def fraction(self) -> float | None:
        """How much has been read, 0 to 1; None if that cannot be known."""


class Source(Protocol):
    def describe(self) -> dict[str, Any]:
        """JSON-able identity: equal for equal documents."""

    def read(self, bad_input: BadInput, cursor: Any = None) -> Reader: ...

    def parts(self) -> Sequence[Source]:
        """The source cut into independent pieces (its files), for sampling."""

    def text_bytes(self) -> int:
        """A rough guess of the size of the text; 0 if unknown."""


class Chain:
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)

    def describe(self) -> dict[str, Any]:
        return {"sources": [source.describe() for source in self.sources]}

    def read(self, bad_input: BadInput, cursor: Any = None) -> _ChainReader:
        return _ChainReader(self.sources, bad_input, cursor)

    def parts(self) -> list[Source]:
        return [part for source in self.sources for part in source.parts()]

    def text_bytes(self) -> int:
        return sum(source.text_bytes() for source in self.sources)


class _ChainReader:
    def __init__(self, sources: list[Source], bad_input: BadInput, cursor: Any):
        self._sources, self._bad_input = sources, bad_input
        self._index: int
        self._inner_cursor: Any
        self._index, self._inner_cursor = cursor or (0, None)
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[str]:
        while self._index < len(self._sources):
            self._reader = self._sources[self._index].read(self._bad_input, self._inner_cursor)
            yield from self._reader
            self._reader, self._inner_cursor = None, None
            self._index += 1

    def cursor(self) -> Any:
        return [self._index, self._reader.cursor() if self._reader else self._inner_cursor]

    def fraction(self) -> float | None:
        sizes = [source.text_bytes() for source in self._sources]
        inner = self._reader.fraction() if self._reader else 0.0
        if inner is None or not all(sizes):
            return None if len(sizes) > 1 else inner
        done = float(sum(sizes[: self._index]))
        if self._index < len(sizes):
            done += inner * sizes[self._index]
        return done / sum(sizes)


def open_source(spec: str, field: str = "text") -> Source:
    """The source a user names on the command line.

    `hf:NAME[:CONFIG[:SPLIT]]` is a Hugging Face dataset (or one on disk), `embedded` the text that comes with
    Python, anything else a file or a folder.
    """
    from altup.data.embedded import Embedded
    from altup.data.files import LocalFiles
    from altup.data.hub import HubDataset

    if spec == "embedded":
        return Embedded()
    if spec.startswith("hf:"):
        name, _, rest = spec[3:].partition(":")
        config, _, split = rest.partition(":")
        if not name:
            raise UserError(
                f"source {spec!r} names no dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
            )
        return HubDataset(name, config or None, split or "train", field)
    return LocalFiles(Path(spec), field)
