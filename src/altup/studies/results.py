"""Results that add up: one row a run and measure, merged by what was measured, whatever machine or day.

A results folder holds `<study>.csv` with tidy rows, and `runs/<key>.json` with what does not fit in a row: config,
curves, learned coefficients. Folders of different machines are merged with `merge`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write
from altup.studies.metrics import METRICS

RUNS = "runs"


@dataclass(frozen=True)
class Result:
    """One number. `seed` is empty and `run` the key of the comparison where no training run is meant (speed)."""

    study: str
    label: str
    size: str
    seed: str
    scale: str
    data: str
    metric: str
    value: float
    unit: str
    step: str
    run: str
    hardware: str
    versions: str
    date: str
    command: str

    @property
    def identity(self) -> tuple[str, ...]:
        """What a newer result replaces. A run's key says everything but which study shows it."""
        return (self.study, self.label, self.size, self.seed, self.scale, self.data, self.metric, self.run)


COLUMNS = [f.name for f in fields(Result)]
OURS = {"study", "label", "metric"}  # columns by which a table of ours is known, whatever version wrote it
# What every record of a run has, and what the reports read of a pretraining run.
RECORD = {"key", "kind", "step", "measures", "hardware", "versions", "date"}
PRETRAIN_RECORD = {"curves", "coefficients"}


def read_results(folder: Path) -> list[Result]:
    """Every row of every study in a results folder."""
    return [result for path in sorted(folder.glob("*.csv")) for result in _read_table(path) or ()]


def _read_table(path: Path) -> list[Result] | None:
    """The rows of a file; None if it is another table that lies beside."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            if columns != set(COLUMNS):
                if not columns >= OURS:
                    return None
                wrong = ", ".join(sorted(columns ^ set(COLUMNS)))
                raise UserError(f"{path} was written by another version of altup (columns {wrong}); move it away")
            return [_read_row(row, f"{path}, line {number}") for number, row in enumerate(reader, start=2)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is damaged ({error}); put a whole copy in its place or remove it") from None


def _read_row(row: dict[Any, Any], place: str) -> Result:
    if set(row) != set(COLUMNS) or None in row.values():
        raise UserError(f"{place}: not a whole result; mend or remove the line")
    if row["metric"] not in METRICS:
        raise UserError(f"{place}: measure {row['metric']!r} is not known to this version of altup")
    try:
        value = float(row["value"])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{place}: {row['value']!r} is not a number; mend or remove the line")
    return Result(**{**row, "value": value})


def write_results(folder: Path, results: Iterable[Result]) -> None:
    """Add rows to a results folder; those of the same identity are replaced, the others stay."""
    folder.mkdir(parents=True, exist_ok=True)
    by_study: dict[str, dict[tuple[str, ...], Result]] = {}
    for result in [*read_results(folder), *results]:
        by_study.setdefault(result.study, {})[result.identity] = result
    for study, rows in by_study.items():
        path = folder / f"{study}.csv"
        if path.exists() and path.stat().st_size and _read_table(path) is None:
            raise UserError(f"{path} holds no results of studies and would be written over; move it away")
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(rows):
            writer.writerow([_plain(getattr(rows[key], name)) for name in COLUMNS])
        atomic_write(path, file.getvalue())


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.8g}"


def read_run_record(folder: Path, key: str) -> dict[str, Any] | None:
    path = folder / RUNS / f"{key}.json"
    return _read_record(path) if path.exists() else None


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        needed = RECORD | (PRETRAIN_RECORD if record["kind"] == "pretrain" else set())
        if record["key"] == path.stem and needed <= record.keys():
            return record
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise UserError(
        f"{path} is not a whole record of a run; put a whole copy in its place or remove it "
        "(`altup study run` makes it again from the run's folder)"
    )


def write_run_record(folder: Path, record: dict[str, Any]) -> None:
    path = folder / RUNS / f"{record['key']}.json"
    atomic_write(path, json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


def merge(source: Path, target: Path) -> tuple[int, int]:
    """Add the results of one folder to another: how many rows and run records came from the source."""
    rows = read_results(source)
    if not rows:
        raise UserError(f"{source} holds no results; `altup study run --out DIR` writes them to DIR/results")
    records = [_read_record(path) for path in sorted((source / RUNS).glob("*.json"))]  # all, before any is written
    write_results(target, rows)
    for record in records:
        write_run_record(target, record)
    return len(rows), len(records)
