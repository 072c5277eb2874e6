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


class HubDataset:
    """A Hugging Face dataset, streamed: by its name on the hub, or by the path of a saved dataset or of a folder
    that `load_dataset` reads."""

    def __init__(self, name: str, config: str | None = None, split: str = "train", field: str = "text"):
        self.name, self.config, self.split, self.field = name, config, split, field

    def describe(self) -> dict[str, Any]:
        from altup.data.text_files import fingerprints

        folder = Path(self.name)
        local = {"files": fingerprints(folder, files_below(folder))} if folder.is_dir() else {}
        names = {"name": folder.name if local else self.name, "config": self.config, "split": self.split}
        return {"kind": "hub", **names, "field": self.field, **local}

    def read(self, bad_input: BadInput, cursor: Any = None) -> _HubReader:
        return _HubReader(self, bad_input, cursor)

    def parts(self) -> list[HubDataset]:
        return [self]

    def text_bytes(self) -> int:
        return 0

    def load(self) -> Any:
        """The `datasets.IterableDataset`."""
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"dataset {self.name!r} needs the datasets library; pip install 'altup[hub]'"
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
            "check the name (hf:NAME:CONFIG:SPLIT) and the network"
        )


class _HubReader:
    """The cursor is the number of records read and the dataset's own state, which skips whole files."""

    def __init__(self, source: HubDataset, bad_input: BadInput, cursor: Any):
        self._source, self._bad_input = source, bad_input
        self._data = source.load()
        self._read: int
        self._read, state = cursor or (0, None)
        if state is not None:
            self._data.load_state_dict(state)
        splits = getattr(self._data.info, "splits", None) or {}
        self._total = splits[source.split].num_examples if source.split in splits else None

    def __iter__(self) -> Iterator[str]:
        field = self._source.field
        records = iter(self._data)
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:
                raise UserError(
                    f"dataset {self._source.name!r} failed after record {self._read} "
                    f"({type(error).__name__}: {error}); "
                    "run the same command again to go on from the last finished shard"
                ) from error
            self._read += 1
            where = f"dataset {self._source.name}, {self._source.split}, record {self._read}"
            text = record.get(field)
            if not isinstance(text, str):
                self._bad_input.report("no text field", where, f"no string {field!r}; name another with --field")
            elif self._bad_input.accept(text, where):
                yield text

    def cursor(self) -> Any:
        return [self._read, self._data.state_dict()]

    def fraction(self) -> float | None:
        return self._read / self._total if self._total else None


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
