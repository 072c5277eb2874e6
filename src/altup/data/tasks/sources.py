"""Where a task's records come from: a folder of files, or Hugging Face `datasets`. Nothing else knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from altup.core.errors import UserError
from altup.core.files import sha256_of
from altup.data.bad_input import BadInput
from altup.data.files import CODECS, PIECE, split_lines
from altup.data.hub import HubDataset
from altup.data.tasks.task import Record, Task

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# A folder may hold one file for the two held-out splits of MNLI; it then counts as the first of them.
STANDS_FOR = {"validation_matched": "validation"}


class TaskSource(Protocol):
    def has(self, task: Task, split: str) -> bool: ...

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        """Each record with a name for its place, in a fixed order."""

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        """JSON-able identity: equal for equal records."""


class TaskFolder:
    """`<folder>/<task.folder>/<split>.jsonl` (.gz, .zst), with the fields of the Hugging Face sets."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(f"data {str(path)!r} is no folder; give one with <suite>/<task>/<split>.jsonl files")

    def find(self, task: Task, split: str) -> Path | None:
        folder = self.path / (task.folder or task.name)
        for name in (split, STANDS_FOR.get(split)):
            for kind in KINDS:
                if name and (path := folder / f"{name}{kind}").exists():
                    return path
        return None

    def has(self, task: Task, split: str) -> bool:
        return self.find(task, split) is not None

    def _file(self, task: Task, split: str) -> Path:
        path = self.find(task, split)
        if path is None:
            folder = self.path / (task.folder or task.name)
            raise UserError(f"task {task.name}: {folder} has no {split}.jsonl (.gz, .zst); put it there")
        return path

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        return read_json_lines(self._file(task, split), bad_input)

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return _identity(self._file(task, split))


class OwnFiles:
    """The files that a user's own task names itself."""

    def has(self, task: Task, split: str) -> bool:
        return split in task.files

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        if split not in task.files:
            raise UserError(f"task {task.name!r} has no {split} file; put {split}.jsonl into its folder")
        return read_json_lines(task.files[split], bad_input)

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return _identity(task.files[split])


class TaskHub:
    """Hugging Face `datasets` by name, or a dataset on disk through the same library."""

    def _dataset(self, task: Task, split: str) -> HubDataset:
        if task.hub is None:
            raise UserError(f"task {task.name!r} is not on the hub; give the folder of its files with --data")
        name, config = task.hub
        return HubDataset(name, config, split)

    def has(self, task: Task, split: str) -> bool:
        return task.hub is not None

    def records(self, task: Task, split: str, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
        dataset = self._dataset(task, split)
        records, number = iter(dataset.load()), 0
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # whatever the library and the network raise
                raise UserError(
                    f"dataset {dataset.name!r}, {split}, failed after record {number} "
                    f"({type(error).__name__}: {error}); check the network and start again"
                ) from error
            number += 1
            yield f"dataset {dataset.name}, {split}, record {number}", record

    def describe(self, task: Task, split: str) -> dict[str, Any]:
        return self._dataset(task, split).describe()


def open_tasks(data: str | None) -> TaskSource:
    """The source that `--data` names: a folder, or the hub where there is none."""
    return TaskFolder(data) if data else TaskHub()


def source_of(task: Task, source: TaskSource) -> TaskSource:
    return OwnFiles() if task.files else source


def _identity(path: Path) -> dict[str, Any]:
    """All of a file counts: one label that was put right in its middle makes another task."""
    try:
        return {"name": path.name, "sha256": sha256_of(path)}
    except OSError as error:
        raise UserError(f"file {path} cannot be read ({error.strerror}); make it readable or remove it") from None


def read_json_lines(path: Path, bad_input: BadInput) -> Iterator[tuple[str, Record]]:
    """The objects of a file, one a line; damage goes to `bad_input`."""
    try:
        for number, line in enumerate(split_lines(_unpacked(path), bad_input.limits.document_bytes), start=1):
            where = f"{path}, line {number}"
            if line is None:
                bad_input.report("too long", where, f"more than {bad_input.limits.document_bytes} bytes")
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                bad_input.report("bad UTF-8", where, f"byte {error.start + 1}")
                continue
            except (ValueError, RecursionError) as error:
                bad_input.report("broken JSON", where, str(error))
                continue
            if isinstance(record, dict):
                yield where, record
            else:
                bad_input.report("broken JSON", where, f"a {type(record).__name__}, not an object")
    except (OSError, pa.ArrowException) as error:
        bad_input.report("damaged file", str(path), f"{str(error).splitlines()[0]}; what follows is lost")


def _unpacked(path: Path) -> Iterator[bytes]:
    with pa.OSFile(str(path)) as packed:
        codec = CODECS.get(path.suffix)
        stream = pa.CompressedInputStream(packed, codec) if codec else packed
        while piece := stream.read(PIECE):
            yield piece
