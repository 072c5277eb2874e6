"""Where documents come from: local files, Hugging Face datasets, the embedded corpus.

A source names and describes a collection of text. Reading it gives documents in a fixed order, and can resume
from a cursor taken after any document. Local files are read by `text_files`, the embedded corpus by `embedded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from altup.core.errors import UserError
from altup.core.files import files_below
from altup.core.hub import hub_problem
from altup.data.bad_input import BadInput


class Reader(Protocol):
    """One pass over a source, document by document."""

    def __iter__(self) -> Iterator[str]: ...

    def cursor(self) -> Any:
        """JSON-able place after the last document given; `Source.read` continues there."""

    def fraction(self) -> float | None:
        """How much of what it reads has been read, 0 to 1; None if that cannot be known."""


class Source(Protocol):
    def describe(self) -> dict[str, Any]:
        """JSON-able identity: equal for equal documents."""

    def read(self, bad_input: BadInput, cursor: Any = None, one_file: bool = False) -> Reader:
        """Read from `cursor` on; with `one_file` to the end of that file."""

    def files(self) -> list[tuple[Any, int]]:
        """For each of its files the cursor at its beginning and a rough size of its text, 0 if unknown."""

    def file_of(self, cursor: Any) -> int:
        """The index in `files` that a cursor stands in."""

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

    def read(self, bad_input: BadInput, cursor: Any = None, one_file: bool = False) -> _ChainReader:
        return _ChainReader(self.sources, bad_input, cursor, one_file)

    def files(self) -> list[tuple[Any, int]]:
        return [
            ([index, cursor], size) for index, source in enumerate(self.sources) for cursor, size in source.files()
        ]

    def file_of(self, cursor: Any) -> int:
        index, inner = cursor
        before = sum(len(source.files()) for source in self.sources[:index])
        return before if inner is None else before + self.sources[index].file_of(inner)

    def parts(self) -> list[Source]:
        return [part for source in self.sources for part in source.parts()]

    def text_bytes(self) -> int:
        return sum(source.text_bytes() for source in self.sources)


class _ChainReader:
    def __init__(self, sources: list[Source], bad_input: BadInput, cursor: Any, one_file: bool):
        self._sources, self._bad_input, self._one_file = sources, bad_input, one_file
        self._index: int
        self._inner_cursor: Any
        self._index, self._inner_cursor = cursor or (0, None)
        self._reader: Reader | None = None

    def __iter__(self) -> Iterator[str]:
        while self._index < len(self._sources):
            source = self._sources[self._index]
            self._reader = source.read(self._bad_input, self._inner_cursor, self._one_file)
            yield from self._reader
            if self._one_file:
                return
            self._reader, self._inner_cursor = None, None
            self._index += 1

    def cursor(self) -> Any:
        return [self._index, self._reader.cursor() if self._reader else self._inner_cursor]

    def fraction(self) -> float | None:
        inner = self._reader.fraction() if self._reader else 0.0
        if self._one_file:
            return inner
        sizes = [source.text_bytes() for source in self._sources]
        if inner is None or not all(sizes):
            return None if len(sizes) > 1 else inner
        done = float(sum(sizes[: self._index]))
        if self._index < len(sizes):
            done += inner * sizes[self._index]
        return done / sum(sizes)


class HubDataset:
    """A Hugging Face dataset, streamed: by its name on the hub, or by the path of a saved dataset or of a folder
    that `load_dataset` reads. `otherwise` is what to do where the hub or the library is missing."""

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        field: str = "text",
        otherwise: str = "check the name (hf:NAME:CONFIG:SPLIT)",
    ):
        self.name, self.config, self.split, self.field = name, config, split, field
        self._dataset: Any = None
        self._otherwise = otherwise

    def describe(self) -> dict[str, Any]:
        from altup.data.text_files import fingerprints

        folder = Path(self.name)
        local = {"files": fingerprints(folder, files_below(folder))} if folder.is_dir() else {}
        names = {"name": folder.name if local else self.name, "config": self.config, "split": self.split}
        return {"kind": "hub", **names, "field": self.field, **local}

    def read(self, bad_input: BadInput, cursor: Any = None, one_file: bool = False) -> _HubReader:
        return _HubReader(self, bad_input, cursor, one_file)

    def files(self) -> list[tuple[Any, int]]:
        return [([index, 0, None], 0) for index in range(self.load().num_shards)]

    def file_of(self, cursor: Any) -> int:
        return int(check_cursor(cursor)[0])

    def parts(self) -> list[HubDataset]:
        return [self]

    def text_bytes(self) -> int:
        return 0

    def load(self) -> Any:
        """The `datasets.IterableDataset`, opened once."""
        if self._dataset is None:
            self._dataset = self._load()
        return self._dataset

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"dataset {self.name!r} needs the datasets library; pip install datasets, or {self._otherwise}"
            ) from None
        folder = Path(self.name)
        if (
            not folder.exists()
            and not self._downloaded(datasets)
            and (problem := hub_problem(self.name, "dataset"))
        ):
            raise self._refused(problem)
        try:
            if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
                saved = datasets.load_from_disk(self.name)
                chosen = saved[self.split] if isinstance(saved, dict) else saved
                return chosen.to_iterable_dataset()
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except Exception as error:  # the library raises dozens of types
            raise self._refused(f"{type(error).__name__}: {error}") from error

    def _downloaded(self, datasets: Any) -> bool:
        """Whether the library has it in its cache and can open it without the hub."""
        return (Path(datasets.config.HF_DATASETS_CACHE) / self.name.replace("/", "___")).is_dir()

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"dataset {self.name!r}, config {self.config!r}, split {self.split!r} cannot be opened ({reason}); "
            f"check the network, or {self._otherwise}"
        )


def check_cursor(cursor: Any) -> list[Any]:
    """A hub dataset's cursor; that of older versions did not tell files apart."""
    if len(cursor) != 3:
        raise UserError(
            "preparing was begun by an older altup, and cannot continue with this one; give another --out"
        )
    return list(cursor)


class _HubReader:
    """The cursor is `[file, records, state]`: the records of that file that have been read, and the dataset's own
    state, which skips to them."""

    def __init__(self, source: HubDataset, bad_input: BadInput, cursor: Any, one_file: bool):
        self._source, self._bad_input, self._one_file = source, bad_input, one_file
        self._data = source.load()
        self._file, self._read, self._state = check_cursor(cursor or [0, 0, None])
        self._open: Any = None
        splits = getattr(self._data.info, "splits", None) or {}
        total = splits[source.split].num_examples if source.split in splits else None
        self._expected = total / self._data.num_shards if total else None  # records of a file, about

    def __iter__(self) -> Iterator[str]:
        field = self._source.field
        while self._file < self._data.num_shards:
            self._open = self._data.shard(self._data.num_shards, self._file)
            if self._state is not None:
                self._open.load_state_dict(self._state)
            for record in self._records():
                self._read += 1
                text, where = record.get(field), self._where()
                if not isinstance(text, str):
                    detail = f"no string {field!r}; name another with --field"
                    self._bad_input.report("no text field", where, detail)
                elif self._bad_input.accept(text, where):
                    yield text
            self._file, self._read, self._state, self._open = self._file + 1, 0, None, None
            if self._one_file:
                return

    def _where(self) -> str:
        file = f"file {self._file + 1}, " if self._data.num_shards > 1 else ""
        return f"dataset {self._source.name}, {self._source.split}, {file}record {self._read}"

    def _records(self) -> Iterator[dict[str, Any]]:
        records = iter(self._open)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # the library raises dozens of types
                raise UserError(
                    f"{self._where()}: reading failed after it ({type(error).__name__}: {error}); "
                    "run the same command again to continue from the last finished shard"
                ) from error
            yield record

    def cursor(self) -> Any:
        return [self._file, self._read, self._open.state_dict() if self._open is not None else self._state]

    def fraction(self) -> float | None:
        within = min(1.0, self._read / self._expected) if self._expected else None
        if self._one_file or within is None:
            return within
        return min(1.0, (self._file + within) / self._data.num_shards)


def open_source(spec: str, field: str = "text") -> Source:
    """The source a user names on the command line.

    `hf:NAME[:CONFIG[:SPLIT]]` is a Hugging Face dataset (or one on disk), `embedded` the text that comes with
    Python, anything else a file or a folder.
    """
    from altup.data.embedded import Embedded
    from altup.data.text_files import LocalFiles

    if not spec:
        raise UserError("source '' names nothing; give a file, a folder, `embedded` or hf:NAME:CONFIG:SPLIT")
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
