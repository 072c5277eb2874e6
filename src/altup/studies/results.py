"""Results that add up: one line a run and measure, whatever machine or day they are from.

A results folder holds `<study>.csv` with a result a line, `runs/<key>.json` with the record of a run (config,
measures, curves, learned coefficients), and `failed/<key>.json` with the jobs that failed. Folders of different
machines are merged with `merge`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write, check_file_name, check_regular, locked, read_json
from altup.core.hardware import device_name, versions
from altup.core.schema import describe_kind, fits
from altup.studies.study import FINETUNED, METRICS

RUNS, FAILED = "runs", "failed"
Record = dict[str, Any]
Records = Callable[[str], Record | None]  # the key of a run, or of a model's speed → its record
RECORD: dict[str, Any] = {
    "key": str, "kind": str, "title": str, "measures": dict[str, float], "hardware": str, "versions": str,
    "date": str,
}  # fmt: skip
OF_KIND: dict[str, dict[str, Any]] = {
    "pretrain": {
        "step": int, "config": dict[str, Any], "curves": dict[str, list[list[float]]],
        "coefficients": dict[str, list[dict[str, Any]]],
    },
    "finetune": {"step": int, "column": str, "tasks": dict[str, dict[str, float]], "missing": list[str]},
    "speed": {},
}  # fmt: skip
CURVES = {"held_out": 3, "train": 2}  # numbers of a point: the step, the loss, the accuracy
LARGEST = 1e30  # number that can be drawn


@dataclass(frozen=True)
class Result:
    """One number. `run` is the key of its record; `seed` is empty where no training run is meant (speed).

    `model` is a hash of what all seeds have in common. `setup` says on what it was measured (of a speed: the key
    of the dense model that took turns), `length` for how long the run was, `budget` what it shares with those that
    it is compared with: see `statistics.reason_against`.
    """

    study: str
    label: str
    size: str
    seed: str
    scale: str
    data: str
    model: str
    setup: str
    length: str
    budget: str
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
        """What a newer result replaces."""
        return (self.study, self.label, self.size, self.seed, self.scale, self.data, self.metric)


COLUMNS = [f.name for f in fields(Result)]
OURS = {"study", "label", "metric"}  # columns by which a table of ours is known, whatever version wrote it


@dataclass(frozen=True)
class ResultFolders:
    """One or several results folders, read together; of what several have the newest counts."""

    folders: Sequence[Path]
    _records: dict[str, Record] = field(default_factory=dict, repr=False)

    @cached_property
    def results(self) -> list[Result]:
        lines = sorted((r for folder in self.folders for r in read_results(folder)), key=lambda r: r.date)
        return list({result.identity: result for result in lines}.values())

    def record(self, key: str) -> Record | None:
        """What a run kept of itself."""
        if key not in self._records:
            found = [
                read_record(path) for folder in self.folders if (path := folder / RUNS / f"{key}.json").exists()
            ]
            if found:
                self._records[key] = max(found, key=lambda record: str(record["date"]))
        return self._records.get(key)

    def records(self) -> list[Record]:
        keys = {path.stem for folder in self.folders for path in (folder / RUNS).glob("*.json")}
        return [record for key in sorted(keys) if (record := self.record(key))]

    def failures(self) -> list[Record]:
        """The jobs that failed and have not been run since, with their reasons."""
        paths = {path.stem: path for folder in self.folders for path in (folder / FAILED).glob("*.json")}
        return [_read(path, {"title": str, "reason": str, "date": str}) for path in paths.values()]


def note_failure(folder: Path, key: str, title: str, reason: str) -> None:
    write_json(folder / FAILED / f"{key}.json", {"key": key, "title": title, "reason": reason, "date": now()})


def forget_failure(folder: Path, key: str) -> None:
    (folder / FAILED / f"{key}.json").unlink(missing_ok=True)


def write_record(folder: Path, record: Record) -> None:
    """Keep what a job recorded; it has not failed then."""
    write_json(folder / RUNS / f"{record['key']}.json", record)
    forget_failure(folder, record["key"])


def read_record(path: Path) -> Record:
    """What a study kept of a run, with a clear error for anything else."""
    record = _read(path, RECORD)
    kinds = OF_KIND.get(record["kind"])
    if kinds is None or (record["kind"] == "finetune" and record.get("column") not in FINETUNED):
        raise _damaged(path, f"its kind is {record['kind']!r}")
    if "diverged" in record:
        kinds = {"step": int, "diverged": str}
    _check_kinds(path, record, kinds)
    for name, numbers in CURVES.items():
        points = record.get("curves", {}).get(name, [])
        if any(len(point) != numbers or not all(abs(value) < LARGEST for value in point) for point in points):
            raise _damaged(path, f"curves.{name} must hold lists of {numbers} finite numbers")
    for entry in record.get("coefficients", {}).get("blocks", []):
        k = range(len(entry.get("g", ())))
        is_whole = fits(entry.get("P"), list[list[float]]) and fits(entry.get("g"), list[float])
        if not is_whole or [len(line) for line in entry["P"]] != [len(k)] * len(k) or entry.get("active") not in k:
            raise _damaged(path, "coefficients.blocks: P, g and active do not belong together")
    return record


def _read(path: Path, kinds: dict[str, Any]) -> Record:
    try:
        found = read_json(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict) or found.get("key") != path.stem:
        raise _damaged(path, "it has another key")
    _check_kinds(path, found, kinds)
    return found


def _check_kinds(path: Path, found: Record, kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if not fits(found.get(name), kind):
            raise _damaged(path, f"{name} must be {describe_kind(kind)}")


def _damaged(path: Path, wrong: str) -> UserError:
    return UserError(
        f"{path} is not a whole record of a run ({wrong}); put a whole copy in its place or remove it "
        "(`altup study run` makes it again)"
    )


def read_results(folder: Path) -> list[Result]:
    """Every result of every study in a results folder."""
    return [result for path in sorted(folder.glob("*.csv")) for result in _read_table(path) or ()]


def _read_table(path: Path) -> list[Result] | None:
    """The results in a file; None if it is another table."""
    try:
        with check_regular(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            if columns != set(COLUMNS):
                if not columns >= OURS:
                    return None
                wrong = ", ".join(sorted(columns ^ set(COLUMNS)))
                raise UserError(f"{path} was written by another version of altup (columns {wrong}); move it away")
            return [_read_line(line, f"{path}, line {number}") for number, line in enumerate(reader, start=2)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is damaged ({error}); put a whole copy in its place or remove it") from None


def _read_line(line: dict[Any, Any], place: str) -> Result:
    if set(line) != set(COLUMNS) or None in line.values():
        raise UserError(f"{place}: not a whole result; correct or remove the line")
    for name in ("study", "run"):  # both name files
        check_file_name(line[name], f"{place}, {name}")
    if line["metric"] not in METRICS:
        raise UserError(f"{place}: measure {line['metric']!r} is not known to this version of altup")
    try:
        value = float(line["value"])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{place}: {line['value']!r} is not a number; correct or remove the line")
    return Result(**{**line, "value": value})


def write_results(folder: Path, results: Iterable[Result]) -> None:
    """Add results to a folder; of those of the same identity the newer one stays. Who else adds to it meanwhile
    waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, None):
        by_study: dict[str, dict[tuple[str, ...], Result]] = {}
        for result in sorted([*read_results(folder), *results], key=lambda r: r.date):  # of equals the new one
            by_study.setdefault(result.study, {})[result.identity] = result
        for study, lines in by_study.items():
            _write_table(folder / f"{check_file_name(study, 'study')}.csv", [lines[key] for key in sorted(lines)])


def _write_table(path: Path, results: Sequence[Result]) -> None:
    if path.exists() and path.stat().st_size and _read_table(path) is None:
        raise UserError(f"{path} holds no results of studies and would be overwritten; move it away")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        cells = (getattr(result, name) for name in COLUMNS)
        writer.writerow([cell if isinstance(cell, str) else f"{cell:.8g}" for cell in cells])
    atomic_write(path, text.getvalue())


def merge(source: Path, target: Path) -> tuple[int, int]:
    """Add the results of one folder to another: how many results and records came from the source.

    Of what both have the newer counts, so that the order of merges does not matter.
    """
    found = ResultFolders([source])
    results, records, failures = (
        read_results(source),
        found.records(),
        found.failures(),
    )  # all read before any is written
    if not results and not records:
        raise UserError(f"{source} holds no results; `altup study run --out DIR` writes them to DIR/results")
    write_results(target, results)
    with locked(target, None):
        for record in records:
            path = target / RUNS / f"{record['key']}.json"
            if not path.exists() or _date_of(path) <= record["date"]:
                write_record(target, record)
        for one in failures:
            if not (target / RUNS / f"{one['key']}.json").exists():
                write_json(target / FAILED / f"{one['key']}.json", one)
    return len(results), len(records)


def _date_of(path: Path) -> str:
    """The date of a record; a damaged one is older than all others."""
    try:
        return str(read_record(path)["date"])
    except UserError:
        return ""


def origin() -> dict[str, str]:
    """Where, with what and when a result is obtained."""
    listed = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "GPU")
    return {"hardware": device_name(), "versions": listed, "date": now()}


def now() -> str:
    """The date, in seconds: of two results the newer counts."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def write_json(path: Path, content: Any) -> None:
    atomic_write(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
