"""Results that add up: one row a run and measure, merged by what was measured, whatever machine or day.

A results folder holds `<study>.csv` with tidy rows, and `runs/<key>.json` with what does not fit in a row: config,
curves, learned coefficients. Folders of different machines are merged with `merge`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from altup.errors import UserError

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


def read_results(folder: Path) -> list[Result]:
    """Every row of every study in a results folder."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                continue  # another table that lies beside
            for number, row in enumerate(reader, start=2):
                try:
                    values: dict[str, Any] = {**row, "value": float(row["value"])}
                    found.append(Result(**values))
                except (TypeError, ValueError):
                    raise UserError(f"{path}, line {number}: not a result; mend or remove the line") from None
    return found


def write_results(folder: Path, results: Iterable[Result]) -> None:
    """Add rows to a results folder; those of the same identity are replaced, the others stay."""
    folder.mkdir(parents=True, exist_ok=True)
    by_study: dict[str, dict[tuple[str, ...], Result]] = {}
    for result in [*read_results(folder), *results]:
        by_study.setdefault(result.study, {})[result.identity] = result
    for study, rows in by_study.items():
        path = folder / f"{study}.csv"
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for key in sorted(rows):
                writer.writerow([_plain(getattr(rows[key], name)) for name in COLUMNS])
        temporary.replace(path)


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.8g}"


def read_run_record(folder: Path, key: str) -> dict[str, Any] | None:
    path = folder / RUNS / f"{key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_run_record(folder: Path, record: dict[str, Any]) -> None:
    path = folder / RUNS / f"{record['key']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    temporary.replace(path)


def merge(source: Path, target: Path) -> tuple[int, int]:
    """Add the results of one folder to another: how many rows and run records came from the source."""
    rows = read_results(source)
    if not rows:
        raise UserError(f"{source} holds no results; `altup study run --out DIR` writes them to DIR/results")
    write_results(target, rows)
    records = sorted((source / RUNS).glob("*.json"))
    for path in records:
        write_run_record(target, json.loads(path.read_text(encoding="utf-8")))
    return len(rows), len(records)
