"""Runs studies: what is finished is not repeated, what was stopped is resumed, and results add up.

`--dry-run` says before how long it will take: from measured speeds where there are any, else from FLOPs and the
device's peak.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altup.core.errors import UserError, choose_one
from altup.core.hardware import PEAK_BF16, device_name, peak_flops
from altup.studies.jobs import (
    MEASURED_ON,
    Job,
    StudyData,
    count_costs,
    deciding_fields,
    finetune_job,
    key_of,
    pretrain_job,
    speed_key,
)
from altup.studies.plan import Context, Model, NotReadyError, Plan, Trial, make_plan
from altup.studies.queue import Queue
from altup.studies.results import Record, Result, ResultFolders, note_failure, write_results
from altup.studies.scale import Scale, prepare_smoke_tasks, prepare_smoke_text
from altup.studies.study import DIVERGED, METRICS, SPEEDS, Study
from altup.studies.sweep import count_points

if TYPE_CHECKING:
    from altup.training.pretraining import PretrainConfig

USE_OF_PEAK = 0.35  # of a GPU's bf16 peak in training, roughly
CPU_FLOPS = 15e9  # what small models reach on one core, roughly
GPU_START, CPU_START = 40.0, 1.0  # seconds to start, compile, evaluate and save
GPU_COMPARISON, CPU_COMPARISON = 31.0, 3.0  # seconds a model in a comparison of speed
GPU_DECODING, CPU_DECODING = 30.0, 2.0  # seconds to decode held-out examples


@dataclass(frozen=True)
class Device:
    """`flops` it reaches in training, and seconds that every run costs beside it."""

    name: str
    flops: float
    start: float
    comparison: float
    decoding: float

    @classmethod
    def here(cls) -> Device:
        import torch

        if torch.cuda.is_available():
            return cls.find(device_name())
        return cls(device_name(), CPU_FLOPS * torch.get_num_threads(), CPU_START, CPU_COMPARISON, CPU_DECODING)

    @classmethod
    def find(cls, name: str) -> Device:
        """A GPU by a part of its name."""
        peak = peak_flops(name)
        if peak is None:
            raise UserError(f"the peak of {name!r} is not known; {choose_one(name, PEAK_BF16)}")
        return cls(name, USE_OF_PEAK * peak, GPU_START, GPU_COMPARISON, GPU_DECODING)


@dataclass(frozen=True)
class StudyOutcome:
    """How many jobs finished, the titles of those that failed or were not run, and how many results there are."""

    finished: int
    failed: list[str]
    remaining: list[str]
    stopped: bool
    results: int


@dataclass(frozen=True)
class Line:
    """Of a dry run: a job, or the `runs` of a sweep; `seconds` are 0 where it is finished."""

    title: str
    state: str
    steps: int
    seconds: float
    runs: int = 1


@dataclass
class StudyRun:
    """Some studies at a scale in the folder `out`. What the folder `results` holds is not run again.

    With `dry` nothing is run, so that text need not be there; `scratch` is where such a run of the smoke scale
    makes its text.
    """

    studies: Sequence[Study]
    scale: Scale
    out: Path
    results: Path
    seeds: Sequence[int]
    data: str | None = None
    tasks: str | None = None
    only: Sequence[str] = ()
    finetune: bool = True
    speed: bool = True
    command: str = "altup study run"
    dry: bool = False
    scratch: Path | None = None
    known: ResultFolders = field(init=False)

    def __post_init__(self) -> None:
        self.known = ResultFolders([self.results])

    @cached_property
    def study_data(self) -> StudyData:
        """The text and tasks; the smoke scale makes its own."""
        if self.tasks is not None and not Path(self.tasks).is_dir():
            raise UserError(f"--tasks {self.tasks}: no such folder; give one with SUITE/TASK/SPLIT.jsonl files")
        if self.data is not None:
            return StudyData.prepared(self.data, self.tasks)
        if self.scale.data != "embedded" and self.dry:
            return StudyData.not_prepared(self.tasks)
        if self.scale.data != "embedded":
            raise UserError(
                f"scale {self.scale.name} needs text: `altup prepare FILES --out DIR`, then --data DIR"
                + ("" if self.scale.base == "smoke" else "; `--scale smoke` brings its own")
            )
        place = self.out / "data"
        if self.scratch is not None and not (place / "tasks" / "done").exists():
            place = self.scratch
        data = prepare_smoke_text(place, self.scale.vocab_size)
        return StudyData.prepared(str(data), self.tasks or str(prepare_smoke_tasks(place)))

    @cached_property
    def device(self) -> Device:
        return Device.here()

    @cached_property
    def plan(self) -> Plan:
        """Made once; what is known by then decides what it runs."""
        self.scale.check_seeds(self.seeds, f"scale {self.scale.name}")
        data = self.study_data
        context = Context(self.scale, data, self.known.record, self.device.name)
        finetune = self.finetune and (data.tasks is not None or self.scale.base == "paper")
        return make_plan(self.studies, context, self.out, self.seeds, self.only, finetune, self.speed)

    def check_needs(self) -> None:
        """UserError, before anything is trained, if a task needs a package that is not installed."""
        from altup.data.tasks import find_tasks
        from altup.evaluation.metrics import check_metrics

        for column in sorted({column for trial in self.plan.trials for column in trial.columns}):
            for task in find_tasks(self.scale.columns[column].tasks):
                check_metrics(task)

    def run(
        self,
        say: Callable[[str], None],
        jobs: int | None = None,
        time_limit: float | None = None,
        at_once: bool = False,
        isolated: bool = False,
        **options: Any,
    ) -> StudyOutcome:
        """Run everything that is not done; `options` are those of the queue."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        width, plan = jobs or max(gpus, 1), self.plan
        self.check_needs()
        self._collect()

        def done(job: Job) -> None:
            record = self.known.record(job.key) or {}
            if reason := record.get("diverged"):
                say(f"diverged: {job.title} ({reason}); it is in no mean")
            self._collect()

        queue = Queue(
            self.out, self.results, say, done,
            lambda job, reason: note_failure(self.results, job.key, job.title, reason),
            self.estimate(self.device), width=width, devices=_devices(gpus),
            isolated=isolated or gpus > 0 or width > 1, at_once=at_once,
            until=time.monotonic() + time_limit if time_limit else math.inf, **options,
        )  # fmt: skip
        queue.run(plan.todo)
        for reason in plan.stuck(queue.failures):
            say(f"skipped: {reason}")
        results = self._collect()
        failed = [job["title"] for job in self.known.failures() if job["key"] in queue.failures]
        remaining = [job.title for job in queue.remaining.values()]
        return StudyOutcome(len(queue.finished), failed, remaining, queue.stopped, len(results))

    # --- from records to results ---

    def _collect(self) -> list[Result]:
        """The results of every trial that has finished anything, written to the results folder."""
        lines = [result for trial in self.plan.trials for result in self._results_of(trial)]
        found = list({result.identity: result for result in lines}.values())
        if found:
            write_results(self.results, found)
        return found

    def _results_of(self, trial: Trial) -> Iterator[Result]:
        model, context = trial.model, self.plan.context
        common: dict[str, Any] = {
            "study": model.study.name, "label": model.row.label, "size": model.variant.name,
            "scale": self.scale.name, "data": context.data.identity,
            "command": f"{self.command} --only {shlex.quote(model.row.label)}",
        }  # fmt: skip
        try:
            jobs = trial.jobs()
        except NotReadyError:
            jobs = {}
        for column, job in jobs.items():
            record = context.known(job.key)
            if record is None:
                continue
            seed, of_model = str(trial.seed), _describe(jobs[""].settings["config"], trial)
            measures = dict(record["measures"])
            if job.kind == "pretrain" and "diverged" not in record and model.budget.startswith("the time"):
                with contextlib.suppress(NotReadyError):  # the speeds are not compared yet
                    measures["planned_seconds"] = job.steps * model.seconds_a_step()
            if "diverged" in record:
                measures["_".join(filter(None, (DIVERGED, column)))] = record["step"]
            yield from _lines(record, {**common, **of_model, "seed": seed, "step": str(record["step"])}, measures)
        record = context.known(model.speed_key)
        if record:
            speed = {"seed": "", "step": "", "model": "", "setup": model.dense_key, "length": "", "budget": ""}
            yield from _lines(
                record, {**common, **speed}, {n: v for n, v in record["measures"].items() if n in SPEEDS}
            )

    # --- how long it will take ---

    def estimate(self, on: Device) -> Callable[[Job], float]:
        """A function that gives a job's seconds on a device."""
        vocabulary = self.study_data.vocabulary
        machines = {on.name} | {r.hardware for r in self.known.results if on.name.lower() in r.hardware.lower()}

        def sequences_a_second(config: PretrainConfig) -> float:
            for machine in sorted(machines):
                if record := self.known.record(speed_key(config, vocabulary.padded_size, machine)):
                    return float(record["measures"]["train_seq_per_s"])
            return on.flops / count_costs(config, vocabulary)["flops_train"]

        speeds: dict[str, float] = {}

        def estimate(job: Job) -> float:
            from altup.training.pretraining import PretrainConfig

            if job.kind == "speed":
                return len(job.settings["configs"]) * on.comparison
            if job.kind == "pretrain":
                speeds[job.key] = sequences_a_second(PretrainConfig.from_dict(job.settings["config"], job.title))
                return on.start + job.sequences / speeds[job.key]
            return on.start + job.sequences / speeds.get(job.settings["of"], 1e3) + on.decoding

        return estimate

    def forecast(self, on: Device) -> list[Line]:
        """What is done and what is to be done: runs, sweeps, and runs whose steps or settings are not known
        yet."""
        estimate, found = self.estimate(on), dict[str, Line]()
        for trial in self.plan.trials:
            for line_key, line in self._forecast_of(trial, estimate):
                found.setdefault(line_key, line)
        for job in self.plan.context.speed_jobs.values():
            found.setdefault(job.key, Line(job.title, "new", 0, estimate(job)))
        return list(found.values())

    def _forecast_of(self, trial: Trial, estimate: Callable[[Job], float]) -> Iterable[tuple[str, Line]]:
        model, context = trial.model, self.plan.context
        yield from self._forecast_sweep(model, estimate)
        try:
            jobs = trial.jobs()
        except NotReadyError:
            jobs = {
                "": replace(pretrain_job(model.config(trial.seed, {}), model.row, context.data), key=trial.title)
            }
        if len(jobs) == 1 and "diverged" not in (context.known(jobs[""].key) or {}):
            jobs |= {n: finetune_job(n, self.scale, jobs[""], trial.seed, context.data) for n in trial.columns}
        for job in jobs.values():
            seconds, is_done = estimate(job), context.known(job.key) is not None
            begun = (job.folder(self.out) / "config.yaml").exists()
            state = "finished" if is_done else "begun" if begun else "new"
            yield job.key, Line(job.title, state, job.steps, 0.0 if is_done else seconds)

    @cached_property
    def _swept(self) -> Counter[str]:
        """How many runs each sweep has made, by its key."""
        return Counter(record["sweep"]["key"] for record in self.known.records() if "sweep" in record)

    def _forecast_sweep(self, model: Model, estimate: Callable[[Job], float]) -> Iterable[tuple[str, Line]]:
        tune = self.scale.tune
        if model.parent:
            yield from self._forecast_sweep(model.parent, estimate)
        if tune is None or not model.grid:
            return
        steps = min(tune.steps, model.untuned.steps)
        job = pretrain_job(model.config(tune.seed, {"steps": steps}), model.row, self.study_data)
        count = count_points(tune.search, model.grid)
        made, is_done = self._swept[model.sweep_key], False
        with contextlib.suppress(NotReadyError):
            is_done = not (found := model.sweep()) or not found.missing
        left = 0 if is_done else max(1, count - made)
        title = f"sweep of {job.title}: {count} runs"
        state = "finished" if is_done else "begun" if made else "new"
        yield model.sweep_key, Line(title, state, steps, left * estimate(job), max(left, 1))


def _devices(gpus: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(i) for i in range(gpus)]) if gpus else []


def _describe(settings: dict[str, Any], trial: Trial) -> dict[str, str]:
    """What the seeds of a model have in common, on what it is measured, and how long it trains: who continues
    another has also what that one had."""
    from altup.training.pretraining import PretrainConfig

    model = trial.model
    config, row, parent = PretrainConfig.from_dict(settings, trial.title), model.row, model.parent
    own = {
        n: value
        for n, value in deciding_fields(config).items()
        if n not in ("seed", "steps" if model.budget else "")
    }
    before = f" after {parent.steps():,} of {parent.untuned.batch_size:,}" if parent else ""
    return {
        "model": key_of(own, row.start, row.continues),
        "setup": ", ".join(f"{name} {getattr(config, name)}" for name in MEASURED_ON),
        "length": f"{config.steps:,} steps of {config.batch_size:,}{before}",
        "budget": model.budget and model.budget + before,
    }


def _lines(record: Record, common: dict[str, Any], measures: dict[str, float]) -> Iterator[Result]:
    origin = {name: record[name] for name in ("hardware", "versions", "date")}
    for metric, value in measures.items():
        if metric in METRICS:
            yield Result(
                **common, **origin, metric=metric, value=value, unit=METRICS[metric].unit, run=record["key"]
            )
