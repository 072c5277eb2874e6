"""From finished jobs to results: what each run measured, kept small enough to be committed."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.studies.machine import hardware, now, versions_text
from altup.studies.metrics import METRICS
from altup.studies.plan import Cell, Job, Plan, deciding_fields, run_folder
from altup.studies.results import Result, read_results, read_run_record, write_results, write_run_record
from altup.studies.work import is_done, read_speed

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

POINTS = 120  # of a curve, at most
# What a column measures: the metric of its one task, or None for the mean over its tasks.
COLUMN_MEASURES: dict[str, dict[str, str | None]] = {
    "glue": {"glue": None},
    "superglue": {"superglue": None},
    "squad": {"squad_em": "exact_match", "squad_f1": "f1_words"},
    "triviaqa": {"triviaqa_em": "trivia_exact_match", "triviaqa_f1": "trivia_f1_words"},
}


def record_job(job: Job, out: Path, results: Path, alone: bool) -> None:
    """Keep what a finished run says of itself; `alone` tells whether its times can be believed."""
    if job.kind == "speed" or read_run_record(results, job.key) or not is_done(job, out):
        return
    make = _pretrain_record if job.kind == "pretrain" else _finetune_record
    record = {
        "key": job.key, "kind": job.kind, "title": job.title, "hardware": hardware(),
        "versions": versions_text(), "date": now(), **make(job, run_folder(out, job), alone),
    }  # fmt: skip
    write_run_record(results, record)


def _pretrain_record(job: Job, folder: Path, alone: bool) -> dict[str, Any]:
    from altup.training.metrics import read_records
    from altup.training.pretraining import PretrainConfig

    config = PretrainConfig.from_dict(job.settings["config"], job.title)
    records = read_records(folder / "metrics.jsonl")
    held_out = [r for r in records if r["split"] == "validation"]
    train = [r for r in records if r["split"] == "train"]
    last = held_out[-1]
    measures = {"accuracy": 100 * last["accuracy"], "steps": last["step"]}
    if last["loss"] is not None:  # metrics.jsonl has null for a number that is not finite
        measures["loss"] = last["loss"]
    if alone:
        measures["train_seconds"] = sum(r["seconds"] for r in train)
    return {
        "config": deciding_fields(config),
        "start": job.settings["start"],
        "data": job.settings["data"],
        "step": last["step"],
        "measures": {**measures, **_costs(config)},
        "curves": {
            "held_out": [
                [r["step"], round(r["loss"], 5), round(100 * r["accuracy"], 3)]
                for r in held_out
                if r["loss"] is not None
            ],
            "train": [[r["step"], round(r["loss"], 4)] for r in _thinned([r for r in train if r.get("loss")])],
        },
        "coefficients": read_coefficients(folder / "final"),
    }


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    every = -(-len(records) // POINTS)
    return records[every - 1 :: every] if every else []


def _costs(run: PretrainConfig) -> dict[str, float]:
    """Parameters, and FLOPs of one of the run's sequences."""
    from altup.data.shards import TokenStream
    from altup.models.accounting import account
    from altup.studies.parts import objective_of

    vocabulary = TokenStream(run.data, "train").vocabulary
    cost = account(run.model_config(vocabulary), run.inputs_length, objective_of(run, vocabulary).targets)
    return {
        "embedding_params": cost.embedding,
        "non_embedding_params": cost.non_embedding,
        "flops_train": cost.flops_train,
    }


def read_coefficients(model: Path) -> dict[str, Any]:
    """What the rules learned: `blocks` are P, g and the active block of each layer; `sequence` a₁, a₂, b."""
    from safetensors import safe_open

    place = re.compile(r"(?:.*\.)?(\w+)\.rule\.updates\.(\d+)\.(P|g)")
    strided = re.compile(r"(?:.*\.)?(\w+)\.layers\.(\d+)\.update\.(a|b)")
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {"blocks": {}, "sequence": {}}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a dict
            for kind, pattern in (("blocks", place), ("sequence", strided)):
                if match := pattern.fullmatch(name):
                    stack, layer, which = match[1], int(match[2]), match[3]
                    value = file.get_tensor(name).float()
                    entry = found[kind].setdefault((stack, layer), {"stack": stack, "layer": layer})
                    entry[which] = _rounded(value.tolist())
    blocks = list(found["blocks"].values())
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for entry in blocks:
        entry["active"] = _active(settings.get("selection"), entry["layer"], len(entry["g"]))
    order = ("encoder", "decoder")
    blocks.sort(key=lambda e: (order.index(e["stack"]) if e["stack"] in order else 2, e["layer"]))
    sequence = sorted(found["sequence"].values(), key=lambda e: e["layer"])
    return {kind: entries for kind, entries in (("blocks", blocks), ("sequence", sequence)) if entries}


def _active(selection: str | list[int] | None, layer: int, blocks: int) -> int:
    if isinstance(selection, list):
        return selection[layer]
    return 0 if selection == "same" else layer % blocks


def _rounded(value: Any) -> Any:
    return [_rounded(v) for v in value] if isinstance(value, list) else round(value, 4)


def _finetune_record(job: Job, folder: Path, alone: bool) -> dict[str, Any]:
    """The scores of the best evaluation, as T5 reports them, with those of every task."""
    from altup.training.metrics import read_records

    held_out = [r for r in read_records(folder / "metrics.jsonl") if r["split"] == "validation"]
    best = max(held_out, key=lambda r: r["score"])
    place = folder / "evaluation" / f"step-{best['step']}" / "scores.json"
    tasks = json.loads(place.read_text(encoding="utf-8"))["tasks"]
    column = job.settings["column"]
    measures = {}
    for name, metric in COLUMN_MEASURES[column].items():
        measures[name] = best["score"] if metric is None else tasks[0]["metrics"][metric]
    return {
        "of": job.settings["of"],
        "column": column,
        "data": job.settings["data"],
        "step": best["step"],
        "measures": measures,
        "tasks": {task["task"]: task["metrics"] for task in tasks},
        "missing": [f"{task['task']}: {part}" for task in tasks for part in task["missing"]],
    }


def collect(plan: Plan, out: Path, results: Path, command: str) -> list[Result]:
    """The rows of every cell that has finished anything, written to the results folder.

    `command` is what is running now; what an earlier one measured keeps its own.
    """
    earlier: dict[str, list[Result]] = {}
    for row in read_results(results):
        earlier.setdefault(row.run, []).append(row)
    found: list[Result] = []
    for cell in plan.cells:
        common: dict[str, Any] = {
            "study": cell.study.name, "label": cell.label, "size": cell.size, "scale": plan.scale.name,
            "data": plan.data, "command": f"{command} --only {shlex.quote(cell.label)}",
        }  # fmt: skip
        found += _run_rows(cell, results, common)
        speed = read_speed(out, cell.speed_key)
        # What another study measured of the same model, on a machine of the same name, counts here too.
        found += _speed_rows(cell, speed, common) if speed else [
            replace(row, **common) for row in earlier.get(cell.speed_key, ())
        ]  # fmt: skip
    commands = {run: rows[0].command for run, rows in earlier.items()}
    found = [replace(row, command=commands.get(row.run, row.command)) for row in found]
    rows = list({row.identity: row for row in found}.values())
    write_results(results, rows)
    return rows


def _run_rows(cell: Cell, results: Path, common: dict[str, Any]) -> Iterable[Result]:
    for job in (cell.pretrain, *cell.finetune.values(), *cell.optional.values()):
        record = read_run_record(results, job.key) if job else None
        if record is None:
            continue
        measures = dict(record["measures"])
        if cell.seconds is not None and job is cell.pretrain:
            measures["planned_seconds"] = cell.seconds
        for metric, value in measures.items():
            if not math.isfinite(value):
                continue  # of a model that diverged; its record tells
            yield Result(
                **common, **_origin(record), seed=str(cell.seed), metric=metric, value=value,
                unit=METRICS[metric].unit, step=str(record["step"]), run=record["key"],
            )  # fmt: skip


def _speed_rows(cell: Cell, speed: dict[str, Any], common: dict[str, Any]) -> Iterable[Result]:
    for metric, value in speed_measures(speed).items():
        yield Result(
            **common, **_origin(speed), seed="", metric=metric, value=value, unit=METRICS[metric].unit, step="",
            run=cell.speed_key,
        )  # fmt: skip


def _origin(record: dict[str, Any]) -> dict[str, str]:
    return {name: record[name] for name in ("hardware", "versions", "date")}


def speed_measures(speed: dict[str, Any]) -> dict[str, float]:
    """What a comparison of speed says, under the names of our measures."""
    memory, generate = speed["peak_memory"], speed["generate"]
    found = {
        "train_seq_per_s": speed["train"]["seq_per_s"],
        "relative_speed": speed["train"]["relative"],
        "relative_forward": speed["forward"]["relative"],
        "forward_ms": speed["forward_ms"],
        "relative_generate": generate["relative"] if generate else None,
        "generate_ms": speed["generate_ms"],
        "peak_memory": memory / 2**30 if memory is not None else None,
    }
    return {name: value for name, value in found.items() if value is not None}
