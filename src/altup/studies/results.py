"""Results that add up: one line a run and measure, merged by what was measured, whatever machine or day.

A results folder holds `<study>.csv` with a result a line, `runs/<key>.json` with the record of a run (config,
curves, learned coefficients), `sweeps/<key>.json` with what was chosen for a model and why, and
`scales/<name>.json` with each scale that was run. Folders of different machines are merged with `merge`. A model
that several studies have is run once: `share_results` shows it in all of them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.core.files import atomic_write, check_file_name, check_regular, locked, read_json
from altup.core.hardware import device_name, versions
from altup.studies.configs import resolve, tuned_names, tuned_settings
from altup.studies.jobs import deciding_fields, file_name, key_of, model_key
from altup.studies.scale import Scale, find_scale
from altup.studies.stored import record_misfit, sweep_misfit
from altup.studies.study import COLLAPSE, COLLAPSES, METRICS, SHIPPED, SUPERSEDED, Study

RUNS = "runs"
SCALE_RECORDS = "scales"
SWEEPS = "sweeps"
RECIPE = {"coefficient_growth"}  # settings whose default has changed: of each model the newest runs count
Record = dict[str, Any]
Records = Callable[[str], Record | None]  # a run's key → its record


@dataclass(frozen=True)
class Result:
    """One number. `run` is the key of its job; `seed` is empty where no training run is meant (speed)."""

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


Place = tuple[str, str, str]  # study, label, size
Measured = dict[tuple[str, str], Result]  # by seed and measure
COLUMNS = [f.name for f in fields(Result)]
OURS = {"study", "label", "metric"}  # columns by which a table of ours is known, whatever version wrote it


def read_results(folder: Path) -> list[Result]:
    """Every result of every study in a results folder."""
    return [result for path in sorted(folder.glob("*.csv")) for result in _read_table(path) or ()]


def _read_table(path: Path) -> list[Result] | None:
    """The results in a file; None if it is another table that lies beside."""
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
    """Add results to a folder; of those of the same identity the newer one stays.

    Who else adds to it meanwhile waits: what one has read, another must not have changed before it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, None):
        _add_results(folder, results)


def _add_results(folder: Path, results: Iterable[Result]) -> None:
    by_study: dict[str, dict[tuple[str, ...], Result]] = {}
    for result in sorted([*read_results(folder), *results], key=lambda r: r.date):  # of equals the new one
        by_study.setdefault(result.study, {})[result.identity] = result
    for study, lines in by_study.items():
        path = folder / f"{check_file_name(study, 'study')}.csv"
        if path.exists() and path.stat().st_size and _read_table(path) is None:
            raise UserError(f"{path} holds no results of studies and would be written over; move it away")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(lines):
            writer.writerow([_plain(getattr(lines[key], name)) for name in COLUMNS])
        atomic_write(path, text.getvalue())


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.8g}"


def read_record(folder: Path, key: str) -> Record | None:
    path = folder / RUNS / f"{key}.json"
    return read_record_file(path) if path.exists() else None


def read_record_file(path: Path) -> Record:
    """What a study kept of a run, with a clear error for anything else."""
    record, wrong = _read(path, record_misfit)
    if wrong is None:
        return record
    raise UserError(
        f"{path} is not a whole record of a run ({wrong}); put a whole copy in its place or remove it "
        "(`altup study run` makes it again from the run's folder)"
    )


def _read(path: Path, misfit: Callable[[Any], str | None]) -> tuple[Record, str | None]:
    """What a JSON file of these folders holds, and what is wrong with it."""
    try:
        found = read_json(path)
    except ValueError as error:
        return {}, str(error)
    wrong = misfit(found)
    return found, wrong or (None if found["key"] == path.stem else f"its key is {found['key']!r}")


def write_record(folder: Path, record: Record) -> None:
    write_json(folder / RUNS / f"{record['key']}.json", record, separators=(",", ":"))


def write_sweep(folder: Path, sweep: Record) -> None:
    write_json(folder / SWEEPS / f"{sweep['key']}.json", sweep)


def read_sweep(folders: Sequence[Path], key: str) -> Record | None:
    """What `Sweep.describe` made of one, from the first folder that has it to its end."""
    name = f"{check_file_name(key, 'sweep')}.json"
    found = [_read_sweep(path) for folder in folders if (path := folder / SWEEPS / name).exists()]
    return next((sweep for sweep in found if sweep["chosen"]), found[0] if found else None)


def count_runs(sweep: Record) -> int:
    """The short ones and the long ones."""
    return len(sweep["runs"]) + len(sweep.get("settled", {}).get("runs", ()))


def read_sweeps(folder: Path) -> list[Record]:
    """All of them, those that have only begun too."""
    return [_read_sweep(path) for path in sorted((folder / SWEEPS).glob("*.json"))]


def _read_sweep(path: Path) -> Record:
    sweep, wrong = _read(path, sweep_misfit)
    if wrong is None:
        return sweep
    raise UserError(
        f"{path} is not a whole sweep ({wrong}); remove it (`altup study run` makes it again from its runs)"
    )


def write_scale(folder: Path, scale: Scale) -> None:
    """Keep what a scale's name stands for, so that readers know what its studies share."""
    write_json(_scale_file(folder, scale.name), asdict(scale), indent=1)


def read_scale(folders: Sequence[Path], name: str) -> Scale | None:
    """The scale of some results; None where it was not stored and is not a shipped one."""
    for path in (_scale_file(folder, name) for folder in folders):
        if path.exists():
            try:
                return Scale.from_dict(read_json(path), str(path))
            except UserError:
                raise
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"{path} is not a whole scale; remove it, or put a whole copy there") from None
    # Results without a scale beside them are from before scales were kept, when `mini` was another.
    before = {"mini": SUPERSEDED[0]}.get(name, name)
    return find_scale(before) if before in SHIPPED else None


def _scale_file(folder: Path, name: str) -> Path:
    """Names with many `--set` are longer than a file's may be."""
    plain = file_name(name)
    return folder / SCALE_RECORDS / f"{plain if len(plain) <= 100 else f'{plain[:80]}-{key_of(name)}'}.json"


def merge(source: Path, target: Path) -> tuple[int, int]:
    """Add the results of one folder to another: how many results and records came from the source.

    Of what both have the newer counts, so that the order of merges does not matter. Several at once add to the
    target one after the other. Sweeps that have only begun are added too.
    """
    results, sweeps = read_results(source), read_sweeps(source)
    if not results and not sweeps:
        raise UserError(f"{source} holds no results; `altup study run --out DIR` writes them to DIR/results")
    # All are read before any is written: a damaged one leaves the target as it was.
    records = [read_record_file(path) for path in sorted((source / RUNS).glob("*.json"))]
    names = {result.scale for result in results} | {sweep["scale"] for sweep in sweeps}
    scales = [
        scale for name in names if _scale_file(source, name).exists() and (scale := read_scale([source], name))
    ]
    target.mkdir(parents=True, exist_ok=True)
    with locked(target, None):
        own = read_results(target), read_sweeps(target), [*_records_in(target)]
        scales = [s for s in scales if _last_use(s, own) <= _last_use(s, (results, sweeps, records))]
        _add_results(target, results)
        for sweep in sweeps:
            known = read_sweep([target], sweep["key"])
            if known is None or count_runs(known) <= count_runs(sweep):
                write_sweep(target, sweep)
        for record in records:
            write_record(target, _newest(record, target))
        for scale in scales:
            write_scale(target, scale)
    return len(results), len(records)


def _records_in(folder: Path) -> Iterable[Record]:
    """Those that can be read."""
    for path in sorted((folder / RUNS).glob("*.json")):
        with contextlib.suppress(UserError):
            yield read_record_file(path)


def _last_use(scale: Scale, folder: tuple[list[Result], list[Record], list[Record]]) -> str:
    """The date of the newest result of a scale, or run of its sweeps, in a folder: results, sweeps and records."""
    results, sweeps, records = folder
    swept = {sweep["key"] for sweep in sweeps if sweep["scale"] == scale.name}
    dates = [record["date"] for record in records if record.get("tunes") in swept]
    return max([*dates, *(result.date for result in results if result.scale == scale.name)], default="")


def _newest(record: Record, folder: Path) -> Record:
    """The record or its copy in the folder, whichever is newer, of the two sweeps that they belong to with the one
    that has more runs: a sweep goes on, and an older record names the sweep before."""
    try:
        known = read_record(folder, record["key"])
    except UserError:  # it is damaged, and this one takes its place
        known = None
    if known is None:
        return record
    newest = max(known, record, key=lambda one: one["date"])
    both = [one for one in (newest, record, known) if "tuned_by" in one]
    if not both:
        return newest
    last = max(both, key=lambda one: count_runs(read_sweep([folder], one["tuned_by"]) or {"runs": []}))
    return {**newest, **{name: last[name] for name in ("tuned_by", "tuned") if name in last}}


def drop_other_settings(results: Sequence[Result], record: Records) -> list[Result]:
    """Of each model only the runs with the tuned settings, and the recipe, of its newest one. A sweep that goes on
    may choose others than before, and a mean must not be of both."""
    tuned = {result.run: run for result in results if (run := TunedRun.find(result.run, record))}
    dates = {tuned[result.run].key: (result.date, result.run) for result in results if result.run in tuned}
    # A model is as old as its pretraining, which has results of its own, whenever it was fine-tuned.
    dates |= {result.run: (result.date, result.run) for result in results if result.run in tuned}
    dropped: set[str] = set()
    for runs in _runs_by_model([result for result in results if result.run in tuned], tuned):
        names = {name for run in runs for name in tuned[run].names} | RECIPE
        last = max(runs, key=lambda run: dates[tuned[run].key])
        dropped |= {run for run in runs if tuned[run].values(names) != tuned[last].values(names)}
    return [result for result in results if result.run not in dropped]


@dataclass(frozen=True)
class TunedRun:
    """A pretraining run, and the names of what was tuned for it or for the run that it continues."""

    key: str
    config: Record
    start: Record
    names: frozenset[str]
    parent: TunedRun | None

    @classmethod
    def find(cls, key: str, record: Records) -> TunedRun | None:
        """The run, or the one that it fine-tuned; None where nothing was tuned."""
        kept = record(key)
        if kept and "of" in kept:
            key = kept["of"]
            kept = record(key)
        if not kept or "config" not in kept:
            return None
        parent = cls.find(kept["continues"]["run"], record) if "continues" in kept else None
        if not kept.get("tuned") and parent is None:
            return None
        names = frozenset(name.partition(".")[0] for name in kept.get("tuned", ()))
        names |= parent.names if parent else frozenset()
        return cls(key, kept["config"], kept.get("start", {}), names, parent)

    def values(self, names: Iterable[str]) -> Any:
        """The settings of these names, here and in the run that it continues."""
        own = {name: self.config.get(name) for name in names}
        return own, self.parent.values(names) if self.parent else None

    def is_model_of(self, other: TunedRun) -> bool:
        """Whether the two differ in nothing but the seed, what was tuned, and what time or a collapse decides."""
        same = are_of_one_model(self.config, other.config, self.names | other.names | RECIPE)
        return same and self.start == other.start and (self.parent is None) == (other.parent is None)


def are_of_one_model(config: Record, other: Record, tuned: Iterable[str]) -> bool:
    """Whether two runs differ in nothing but what was tuned, the seed, and what time or a collapse decides."""
    names = (config.keys() | other.keys()) - {*tuned, "seed", "steps", "on_spike"}
    return all(config.get(name) == other.get(name) for name in names)


def _runs_by_model(results: Sequence[Result], tuned: Mapping[str, TunedRun]) -> list[set[str]]:
    """The runs of each model. Places that share a run show the same model, unless a label has changed it."""
    models: list[tuple[set[Place], set[str]]] = []
    for result in results:
        places, runs = {(result.study, result.label, result.size)}, {result.run}
        others = []
        for model in models:
            one = tuned[next(iter(model[1]))]
            if (places & model[0] or runs & model[1]) and one.is_model_of(tuned[result.run]):
                places, runs = places | model[0], runs | model[1]
            else:
                others.append(model)
        models = [*others, (places, runs)]
    return [runs for _, runs in models]


def share_results(
    results: Sequence[Result], studies: Sequence[Study], scale: Scale, record: Records
) -> list[Result]:
    """The results of one scale with every seed and measure of a model under all the studies that have that model.

    Models are the same where everything that decides what they compute is, except the seed and what was tuned for
    them, as each model is tuned once. Those that continue another stay in the study that they were run for.
    """
    collapsed = {result.run for result in results if result.metric in COLLAPSES}
    by_place: dict[Place, Measured] = {}
    for result in sorted(results, key=lambda r: (r.date, r.run)):
        if result.run in collapsed and result.metric not in COLLAPSES:
            continue  # it must not hide the run that repeats it
        place = result.study, result.label, result.size
        # Of a seed a run may have collapsed and the one that repeated it too: both are kept.
        measure = f"{result.metric} of {result.run}" if result.metric in COLLAPSES else result.metric
        by_place.setdefault(place, {})[result.seed, measure] = result
    models: dict[str, Measured] = {}
    for found in by_place.values():
        for (seed, _), result in found.items():
            kept = record(result.run) if result.metric in ("accuracy", COLLAPSE) else None
            if kept and "continues" not in kept and {"config", "start"} <= kept.keys():
                of_seed = {which: r for which, r in found.items() if which[0] in (seed, "")}
                models.setdefault(_untuned_key(kept["config"], kept["start"], kept.get("tuned", ())), {}).update(
                    of_seed
                )
    added = []
    for (study, label, size), model in _models_of(studies, scale):
        own = by_place.get((study, label, size), {})
        added += [
            replace(result, study=study, label=label, size=size)
            for which, result in models.get(model, {}).items()
            if which not in own
        ]
    return [*results, *added]


def add_given_speeds(results: Sequence[Result], studies: Sequence[Study]) -> list[Result]:
    """The results, and the training speeds that studies give for the models they ran, of no machine. What was
    measured counts more: a study of which any speed was measured is left as it is."""
    speed = "relative_speed"
    measured = {result.study for result in results if result.metric == speed}
    ran = {(r.study, r.label, r.size): r for r in results if r.seed}
    changes = {"metric": speed, "unit": METRICS[speed].unit, "seed": "", "step": "", "run": "", "hardware": ""}
    given = [
        replace(found, value=study.speeds[label], **changes)
        for study in studies
        if study.name not in measured
        for (name, label, _), found in ran.items()
        if name == study.name and label in study.speeds
    ]
    return [*results, *given]


def _models_of(studies: Sequence[Study], scale: Scale) -> Iterable[tuple[Place, str]]:
    """Every model that the studies run at the scale."""
    for study in studies:
        for variant in scale.variants_of(study):
            for row in study.rows:
                timed_by = study.timed_by(row)
                if row.continues or (timed_by and (scale.minutes is not None or timed_by != row.label)):
                    continue  # steps that fit into a time are not known here
                changes = {**variant.changes(study, row), **tuned_settings(scale)}
                config = resolve(study, row, variant.size, scale, 0, "DATA", changes)
                if config is None:
                    continue
                key = _untuned_key(
                    deciding_fields(config), row.start, tuned_names(study, row, variant.size, scale)
                )
                yield (study.name, row.label, variant.name), key


def _untuned_key(config: dict[str, Any], start: dict[str, str], tuned: Iterable[str]) -> str:
    """Of a model before it was tuned, whether or not a run of it had to be repeated after a collapse."""
    config = {name: value for name, value in config.items() if name != "on_spike"}
    if not (names := sorted(tuned)):
        return model_key(config, start)
    return key_of(model_key(_without(config, names), start), names)


def _without(config: dict[str, Any], tuned: Iterable[str]) -> dict[str, Any]:
    """A config without what was tuned. `lr_factors.embeddings` is one entry of a mapping: others may have been
    given, and tell models apart."""
    kept = dict(config)
    for name in tuned:
        field_name, _, entry = name.partition(".")
        given = kept.pop(field_name, None)
        if entry and (others := {key: value for key, value in (given or {}).items() if key != entry}):
            kept[field_name] = others
    return kept


def origin() -> dict[str, str]:
    """Where, with what and when a result is obtained. The date has seconds: of two results the newer counts."""
    told = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "GPU")
    return {"hardware": device_name(), "versions": told, "date": time.strftime("%Y-%m-%d %H:%M:%S")}


def write_json(path: Path, content: Any, **form: Any) -> None:
    atomic_write(path, json.dumps(content, ensure_ascii=False, **form) + "\n")
