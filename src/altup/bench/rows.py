"""Results as tidy rows: one number a row, with everything needed to read it alone."""

from __future__ import annotations

import csv
import json
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import altup
from altup.core.errors import UserError
from altup.core.files import check_regular, flush, parse_json
from altup.core.hardware import installed

OK, DISAGREES, FAILED, SKIPPED = "ok", "disagrees", "failed", "skipped"
KINDS = ("ours", "plain", "peer", "floor")


@dataclass(frozen=True)
class Machine:
    """Where and with what the rows of a run were measured."""

    device: str
    dtype: str
    torch: str
    triton: str
    transformers: str
    python: str
    altup: str
    commit: str
    command: str
    date: str

    @classmethod
    def here(cls, device: Any, dtype: Any) -> Machine:
        import torch

        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
        return cls(
            device=name,
            dtype=str(dtype).removeprefix("torch."),
            torch=torch.__version__,
            triton=installed("triton") or "",
            transformers=installed("transformers") or "",
            python=platform.python_version(),
            altup=altup.__version__,
            commit=_commit(),
            command=shlex.join(["altup", *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True)
class BenchRow:
    """`metric` says what p20, p50 and p80 are: ms, s (to start), GiB (at the peak), a rate such as seq/s, MHz and
    W of the GPU, a fraction, or speedup over what `note` names, where p20 and p80 bound its 95 % interval. Where
    there is no number, `status` and `note` say why."""

    case: str
    provider: str
    kind: str
    mode: str
    metric: str
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    samples: int = 0
    status: str = OK
    error: float | None = None
    note: str = ""
    size: str | None = None
    method: str | None = None
    batch: int | None = None
    inputs: int | None = None
    targets: int | None = None
    tokens: int | None = None
    heads: int | None = None
    d: int | None = None
    k: int | None = None
    vocabulary: int | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}


COLUMNS = [field.name for field in (*fields(BenchRow), *fields(Machine))]
SIZES = ("size", "method", "batch", "inputs", "targets", "tokens", "heads", "d", "k", "vocabulary")


class Sheet:
    """A file that rows are added to as they come: CSV, or JSON lines where its name ends in .json or .jsonl."""

    def __init__(self, path: Path | TextIO, machine: Machine, as_json: bool = False) -> None:
        self.machine = machine
        self._stream = None if isinstance(path, Path) else path
        self._path = path if isinstance(path, Path) else None
        self._json = as_json
        if self._path is not None:
            self._json = self._path.suffix in (".json", ".jsonl")
            if self._path.suffix not in (".csv", ".json", ".jsonl"):
                raise UserError(f"--out {self._path}: name a file that ends in .csv, .json or .jsonl")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                read_rows(self._path)
            elif not self._json:
                self._write(",".join(COLUMNS) + "\n")
        elif not self._json:
            self._write(",".join(COLUMNS) + "\n")

    def add(self, row: BenchRow, machine: Machine | None = None) -> None:
        """`machine` is where another run measured it."""
        record = {**asdict(row), **asdict(machine or self.machine)}
        if self._json:
            self._write(json.dumps(record) + "\n")
            return
        line = _Line()
        csv.DictWriter(line, COLUMNS, lineterminator="\n").writerow(record)
        self._write(line.text)

    def _write(self, text: str) -> None:
        if self._path is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
        flush(self._path)


class _Line:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def read_rows(path: Path) -> list[tuple[BenchRow, Machine]]:
    """Rows that a `Sheet` wrote."""
    try:
        text = check_regular(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file written by --out") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text; give a file written by --out") from None
    try:
        if path.suffix == ".csv":
            table = csv.DictReader(text.splitlines())
            if table.fieldnames != COLUMNS:
                raise ValueError(f"its columns are {table.fieldnames}")
            records = [{name: _value(name, cell) for name, cell in record.items()} for record in table]
        else:
            records = [parse_json(line) for line in text.splitlines() if line]
        names = {field.name for field in fields(BenchRow)}
        found = [
            (
                BenchRow(**{name: record[name] for name in record if name in names}),
                Machine(**{name: record[name] for name in record if name not in names}),
            )
            for record in records
        ]
        for row, _ in found:
            if row.kind not in KINDS or not isinstance(row.p50, int | float | None):
                raise ValueError(f"kind {row.kind!r}, p50 {row.p50!r}")
        return found
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} holds no rows of this version of `altup bench` ({error}); choose another file"
        ) from None


def _value(name: str, cell: str) -> Any:
    """A cell of a CSV file in the type of its column."""
    kind = {field.name: str(field.type) for field in fields(BenchRow)}.get(name, "str")
    if "None" in kind and cell == "":
        return None
    return float(cell) if "float" in kind else int(cell) if "int" in kind else cell


def _commit() -> str:
    """The commit of the source tree, with a + where it has changed since; empty for an installed package."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
        return run.stdout.strip() if run.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "--", str(folder.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return ""
