"""Documents from a Hugging Face dataset, streamed; or from one on disk, through the same code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.hub import hub_problem
from altup.data.bad_input import BadInput
from altup.data.files import prints


class HubDataset:
    """A dataset by its name on the hub, or by the path of a saved dataset or of a folder `load_dataset` reads."""

    def __init__(self, name: str, config: str | None = None, split: str = "train", field: str = "text"):
        self.name, self.config, self.split, self.field = name, config, split, field

    def describe(self) -> dict[str, Any]:
        folder = Path(self.name)
        local = (
            {"files": prints(folder, sorted(p for p in folder.rglob("*") if p.is_file()))}
            if folder.is_dir()
            else {}
        )
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
        except Exception as error:  # the library raises dozens of kinds, for names, splits, files and the network
            raise self._refused(f"{type(error).__name__}: {error}") from error

    def _downloaded(self, datasets: Any) -> bool:
        """Whether the library has made it here before, and may do so again without the hub."""
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
