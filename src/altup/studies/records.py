"""From finished jobs to records and results: what each run measured, kept small enough to be committed."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError
from altup.core.files import read_json
from altup.studies.coefficients import read_coefficients
from altup.studies.jobs import DIVERGED, Job, deciding_fields, objective_of, read_speed, speed_file
from altup.studies.plan import Plan, Trial
from altup.studies.results import (
    Record,
    Result,
    origin,
    read_record,
    read_results,
    write_record,
    write_results,
    write_scale,
    write_sweep,
)
from altup.studies.stored import is_finite
from altup.studies.study import COLLAPSE, FINETUNED, METRICS

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

POINTS = 120  # of a curve, at most


def record_job(job: Job, out: Path, results: Path, alone: bool) -> bool:
    """Store the record of a finished run, unless there is one; its times are valid only if it ran `alone`. False
    where nothing was stored."""
    if job.kind == "speed" or read_record(results, job.key) or not job.is_done(out) or lacks_scores(job, out):
        return False
    folder = job.folder(out)
    diverged = (folder / DIVERGED).exists()
    if job.kind == "pretrain":
        from altup.training.pretraining import PretrainConfig

        config = PretrainConfig.from_dict(job.settings["config"], job.title)
        found = _describe_diverged(config, folder) if diverged else describe_run(config, folder, alone)
        kept = ("start", "continues", "data", "tunes", "tuned_by", "tuned")
        found |= {name: job.settings[name] for name in kept if name in job.settings}
    else:
        found = {name: job.settings[name] for name in ("of", "column", "data")}
        found |= _end_of(folder) if diverged else _describe_finetuning(job, folder)
    write_record(results, {"key": job.key, "kind": job.kind, "title": job.title, **origin(), **found})
    return True


def follow_sweep(job: Job, results: Path) -> None:
    """Let the record of a run belong to the sweep that chose its settings last. Since the run was made a setting
    may have been added to the grid."""
    known = read_record(results, job.key)
    found: Record = {name: job.settings[name] for name in ("tuned_by", "tuned") if name in job.settings}
    if known and found and {**known, **found} != known:
        write_record(results, {**known, **found})


def lacks_scores(job: Job, out: Path) -> bool:
    """Whether a finished run was never measured, because its evaluations failed."""
    from altup.training.metrics import VALIDATION, read_records

    folder = job.folder(out)
    measured = (r["split"] == VALIDATION for r in read_records(folder / "metrics.jsonl"))
    return not (folder / DIVERGED).exists() and not any(measured)


def describe_run(config: PretrainConfig, folder: Path, alone: bool) -> Record:
    """What a finished pretraining run in `folder` measured, its curves and its learned coefficients."""
    held_out, train = _read_run(folder, config.steps)
    last = held_out[-1]
    costs = _costs(config)
    total = costs["flops_train"] * config.batch_size * last["step"]
    measures = {"accuracy": 100 * last["accuracy"], "steps": last["step"], "run_flops": total}
    if last["loss"] is not None:  # metrics.jsonl has null for a number that is not finite
        measures["loss"] = last["loss"]
    if alone:
        measures["train_seconds"] = sum(r["seconds"] for r in train)
    has_weights = any(folder.glob("final/*.safetensors"))
    coefficients = read_coefficients(folder / "final") if has_weights else {}
    return {
        "config": deciding_fields(config),
        "step": last["step"],
        "measures": {**measures, **costs},
        "curves": _curves(held_out, train),
        "coefficients": coefficients if is_finite(coefficients) else {},
    }


def _curves(held_out: list[dict[str, Any]], train: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Of a run that diverged, as far as they can be drawn."""
    return {
        "held_out": [
            [r["step"], round(r["loss"], 5), round(100 * r["accuracy"], 3)]
            for r in held_out
            if r["loss"] is not None and is_finite(r["loss"])
        ],
        "train": [
            [r["step"], round(r["loss"], 4)]
            for r in _thinned([r for r in train if r.get("loss") and is_finite(r["loss"])])
        ],
    }


def _read_run(folder: Path, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The evaluations of a finished run, and its records of training.

    UserError where the evaluation of the last step is missing: an earlier one must not be taken for it.
    """
    held_out, train = _read_metrics(folder)
    if not held_out or held_out[-1]["step"] != steps:
        raise UserError(
            f"{folder / 'metrics.jsonl'} has no evaluation of the last step, {steps:,}: it failed, or the file "
            f"was cut; put a whole copy in its place, or remove {folder} and run it again"
        )
    return held_out, train


def _read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from altup.training.metrics import read_records

    records = read_records(folder / "metrics.jsonl")
    held_out, train = ([r for r in records if r.get("split") == split] for split in ("validation", "train"))
    return held_out, train


def _describe_diverged(config: PretrainConfig, folder: Path) -> Record:
    """A run that diverged has no measure. In a sweep it is worse than all others, elsewhere it has collapsed."""
    curves = _curves(*_read_metrics(folder))
    return {"config": deciding_fields(config), "curves": curves, "coefficients": {}, **_end_of(folder)}


def _end_of(folder: Path) -> Record:
    """Where a run that diverged ended, and why."""
    held_out, train = _read_metrics(folder)
    last = max((r["step"] for r in (*held_out, *train)), default=0)
    return {"step": last, "measures": {}, "diverged": read_json(folder / DIVERGED)["reason"]}


def find_collapse(record: Record) -> dict[str, float]:
    """The measure that says of a run that it collapsed: how far pretraining stood above its own lowest held-out
    loss when that was last measured, or the step by which fine-tuning diverged. Nothing of a run that trained."""
    if record["kind"] != "pretrain":
        return {FINETUNED[record["column"]].collapse: record["step"]} if "diverged" in record else {}
    rise = _find_rise(record)
    return {} if rise is None else {COLLAPSE: rise}


def _find_rise(record: Record) -> float | None:
    """Of a pretraining run that collapsed; None of one that trained.

    It has collapsed if it ends more than a nat above, without a finite loss, or before its last step, because it
    diverged or stayed more than a nat above. It has then lost what it had learned, and says nothing of its model.
    """
    from altup.training.spikes import has_collapsed, rise_above_lowest

    losses = [loss for _, loss, _ in record["curves"]["held_out"]] or [0.0]
    has_loss = math.isfinite(record["measures"].get("loss", math.inf))
    trained = has_loss and "diverged" not in record and not has_collapsed(losses)
    return None if trained else rise_above_lowest(losses)


def drop_weights(folder: Path) -> None:
    """Of a sweep's run, once it is recorded: nothing is made of its model."""
    for path in (*folder.glob("final/*.safetensors"), *folder.glob("checkpoints/*")):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    every = -(-len(records) // POINTS)
    return records[every - 1 :: every] if every else []


def _costs(run: PretrainConfig) -> dict[str, float]:
    """Parameters, and FLOPs of one of the run's sequences."""
    from altup.data.shards import TokenStream
    from altup.models.accounting import account

    vocabulary = TokenStream(run.data, "train").vocabulary
    cost = account(run.model_config(vocabulary), run.inputs_length, objective_of(run, vocabulary).targets)
    return {
        "embedding_params": cost.embedding,
        "non_embedding_params": cost.non_embedding,
        "flops_train": cost.flops_train,
    }


def _describe_finetuning(job: Job, folder: Path) -> Record:
    """The scores of the best evaluation, as T5 reports them, with those of every task."""
    held_out, _ = _read_run(folder, job.steps)
    best = max(held_out, key=lambda r: r["score"])
    place = folder / "evaluation" / f"step-{best['step']}" / "scores.json"
    tasks = json.loads(place.read_text(encoding="utf-8"))["tasks"]
    measures = {}
    for name, metric in FINETUNED[job.settings["column"]].measures.items():
        measures[name] = best["score"] if metric is None else tasks[0]["metrics"][metric]
    return {
        "step": best["step"],
        "measures": measures,
        "tasks": {task["task"]: task["metrics"] for task in tasks},
        "missing": [f"{task['task']}: {part}" for task in tasks for part in task["missing"]],
    }


def collect(plan: Plan, out: Path, results: Path, command: str) -> list[Result]:
    """The results of every trial that has finished anything, written to the results folder.

    `command` is what is running now; what an earlier one measured keeps its own.
    """
    earlier = read_results(results)
    commands = {result.run: result.command for result in reversed(earlier)}
    found: list[Result] = []
    for trial in plan.trials:
        common: dict[str, Any] = {
            "study": trial.study.name, "label": trial.label, "size": trial.size, "scale": plan.scale.name,
            "data": plan.data, "command": f"{command} --only {shlex.quote(trial.label)}",
        }  # fmt: skip
        found += _run_results(trial, results, common)
        found += _speed_results(trial, out, earlier, common)
    found = [replace(result, command=commands.get(result.run, result.command)) for result in found]
    unique = list({result.identity: result for result in found}.values())
    write_results(results, unique)
    write_scale(results, plan.scale)
    if plan.scale.tune:
        for sweep in plan.sweeps():
            if sweep.runs or (sweep.relative and sweep.chosen):
                write_sweep(results, sweep.describe(plan.scale.tune, plan.scale.name))
    return unique


def _run_results(trial: Trial, results: Path, common: dict[str, Any]) -> Iterable[Result]:
    for job in (trial.collapsed, trial.pretrain, *trial.collapsed_finetune, *trial.finetune.values()):
        record = read_record(results, job.key) if job else None
        if record is None:
            continue
        measures = dict(record["measures"])
        if trial.seconds is not None and record["kind"] == "pretrain":
            measures["planned_seconds"] = trial.seconds
        measures |= find_collapse(record)
        for metric, value in measures.items():
            if not math.isfinite(value):
                continue  # of a model that diverged; its record tells
            yield Result(
                **common, **_origin_of(record), seed=str(trial.seed), metric=metric, value=value,
                unit=METRICS[metric].unit, step=str(record["step"]), run=record["key"],
            )  # fmt: skip


def _speed_results(trial: Trial, out: Path, earlier: Iterable[Result], common: dict[str, Any]) -> Iterable[Result]:
    """The speed of a trial's model, as measured here; else, where it has none yet, as last measured for another
    row or study."""
    path = speed_file(out, trial.speed_key)
    if not path.exists():
        place = (trial.study.name, trial.label, trial.size)
        known = [result for result in earlier if result.run == trial.speed_key]
        if not any((result.study, result.label, result.size) == place for result in known):
            newest = max((result.date for result in known), default="")
            yield from (replace(result, **common) for result in known if result.date == newest)
        return
    speed = read_speed(path)
    for metric, value in speed_measures(speed).items():
        yield Result(
            **common, **_origin_of(speed), seed="", metric=metric, value=value, unit=METRICS[metric].unit,
            step="", run=trial.speed_key,
        )  # fmt: skip


def _origin_of(record: Record) -> dict[str, str]:
    return {name: record[name] for name in ("hardware", "versions", "date")}


def speed_measures(speed: Record) -> dict[str, float]:
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
