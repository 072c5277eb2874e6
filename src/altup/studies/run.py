"""Runs studies: what is finished is not repeated, what was stopped goes on, and results add up.

Says before how long it will take: from measured speeds where there are any, else from FLOPs and the device's peak.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.errors import UserError, choose_one
from altup.core.hardware import PEAK_BF16, device_name, peak_flops
from altup.studies.jobs import Job, StudyData, objective_of, read_speed, speed_file, speed_key, usual_fields
from altup.studies.plan import KnownSpeed, Plan, make_plan
from altup.studies.queue import Queue
from altup.studies.records import collect, drop_weights, find_collapse, follow_sweep, lacks_scores, record_job
from altup.studies.results import Place, Result, read_record, read_results
from altup.studies.scale import Scale, prepare_smoke_tasks, prepare_smoke_text
from altup.studies.study import COLLAPSE, Study

USE_OF_PEAK = 0.35  # what runs of small to large models reach of a GPU's bf16 peak, roughly
CPU_FLOPS = 15e9  # what small models reach on one core, roughly
GPU_START, CPU_START = 40.0, 1.0  # seconds to start, compile, evaluate and save
COMPARISON = 31.0  # seconds a model in a comparison of speed on a GPU: eleven small ones took 336 on an H200
DECODING = 30.0  # seconds to decode held-out examples on a GPU: 10,570 of SQuAD took 28 with base on an H200


@dataclass(frozen=True)
class StudyOutcome:
    """The outcome of a run: jobs finished, keys that failed or were left for later, results written."""

    finished: int
    failed: list[str]
    left: list[str]
    stopped: bool
    results: int


@dataclass
class StudyRun:
    """Some studies at a scale in the folder `out`. `results` may be a folder with earlier results: what it holds
    is not run again, and what is found is added to it."""

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
    repeat_collapsed: bool = False
    dry: bool = False  # nothing is run, so that text need not be there
    scratch: Path | None = None  # where a dry run makes the text of the smoke scale, if `out` does not have it

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
        return this_device()

    @cached_property
    def _earlier(self) -> list[Result]:
        """What the results folder held at the start."""
        return read_results(self.results)

    @cached_property
    def _earlier_speeds(self) -> dict[str, KnownSpeed]:
        found: dict[str, dict[str, float]] = {}
        for result in self._earlier:
            if result.metric in ("train_seq_per_s", "relative_speed"):
                found.setdefault(result.run, {})[result.metric] = result.value
        return {
            key: KnownSpeed(v["train_seq_per_s"], v["relative_speed"]) for key, v in found.items() if len(v) == 2
        }

    def speeds(self) -> dict[str, KnownSpeed]:
        """Measured speeds by key, from earlier results and from this folder."""
        here = {}
        for path in speed_file(self.out, "").parent.glob("*.json"):
            train = read_speed(path)["train"]
            here[path.stem] = KnownSpeed(train["seq_per_s"], train["relative"])
        return {**self._earlier_speeds, **here}

    def plan(self) -> Plan:
        data = self.study_data
        self.scale.check_seeds(self.seeds, f"scale {self.scale.name}")
        made = self._steps_made()
        return make_plan(
            self.studies, self.scale, data, seeds=self.seeds, only=self.only,
            finetune=self.finetune and (data.tasks is not None or self.scale.base == "paper"),
            speeds=self.speeds(), machine=self.device.name,
            # Other seeds of an equal-time run take as many steps as the first.
            chosen_steps=lambda study, label, size: made.get((study.name, label, size)),
            losses=self._loss, collapsed=self._collapsed, repeat_collapsed=self.repeat_collapsed,
        )  # fmt: skip

    def _steps_made(self) -> dict[Place, int]:
        """The steps of runs that were made here at this scale; of one that stopped before its end, all of them."""
        here = self.scale.name, self.study_data.identity, self.device.name
        made: dict[Place, int] = {}
        for r in reversed(read_results(self.results)):
            if (r.scale, r.data, r.hardware) != here or r.metric not in ("steps", COLLAPSE):
                continue
            steps = round(r.value) if r.metric == "steps" else self._planned_steps(r.run)
            if steps:
                made[r.study, r.label, r.size] = steps
        return made

    def _planned_steps(self, key: str) -> int | None:
        from altup.training.pretraining import PretrainConfig

        record = read_record(self.results, key)
        return {**usual_fields(PretrainConfig), **record["config"]}["steps"] if record else None

    def _loss(self, key: str) -> float | None:
        """Of a sweep's run: infinite if it diverged, None if it is not done."""
        record = read_record(self.results, key)
        return None if record is None else record["measures"].get("loss", math.inf)

    def _collapsed(self, key: str) -> bool | None:
        """Whether a run lost what it had learned, or fine-tuning diverged; None where it is not done."""
        record = read_record(self.results, key)
        return None if record is None else bool(find_collapse(record))

    def estimate(self, on: Device) -> Callable[[Job], float]:
        """A function that gives a job's seconds on a device."""
        vocabulary, speeds = self.study_data.vocabulary, self.speeds()
        full_names = sorted({r.hardware for r in self._earlier if on.name.lower() in r.hardware.lower()})

        def measured(config: Any) -> float | None:
            keys = [speed_key(config, vocabulary.padded_size, name) for name in (on.name, *full_names)]
            return next((speeds[key].seq_per_s for key in keys if key in speeds), None)

        return make_estimate(on, vocabulary, measured)

    def is_done(self, job: Job) -> bool:
        return job.is_done(self.out) or read_record(self.results, job.key) is not None

    def todo(self, plan: Plan) -> list[Job]:
        """The training jobs that are not done; a model that others need must be there, not only its record."""
        jobs = {job.key: job for job in plan.training()}
        found = more = {job.key for job in plan.wanted() if not self.is_done(job)}
        while more := {need for key in more for need in jobs[key].needs if not jobs[need].is_done(self.out)}:
            found = found | more
        return [job for key, job in jobs.items() if key in found]

    def _never_measured(self, plan: Plan) -> list[Job]:
        """The runs that have ended without a record, because their evaluations failed. Sweeps wait for theirs."""
        jobs = {job.key: job for job in (*plan.tuning(), *plan.training()) if job.is_done(self.out)}
        unknown = [job for job in jobs.values() if read_record(self.results, job.key) is None]
        return [job for job in unknown if lacks_scores(job, self.out)]

    def _next_of_sweeps(self, plan: Plan) -> list[Job]:
        """The runs that sweeps wait for. The models that they go on from must be there, not only their records."""
        return [job for job in plan.tuning() if not job.is_done(self.out)]

    def _plan_with_records(self) -> Plan:
        """A plan that knows of every run in this folder, also of those that the results did not have."""
        plan = self.plan()
        while [
            job
            for job in (*plan.tuning(), *plan.training())
            if record_job(job, self.out, self.results, alone=False)
        ]:
            plan = self.plan()  # a sweep may go on, and nothing goes on from a run that collapsed
        for job in (*plan.training(), *(trial.collapsed for trial in plan.trials if trial.collapsed)):
            follow_sweep(job, self.results)
        return plan

    def _tell_collapse(self, job: Job) -> str:
        reason = (read_record(self.results, job.key) or {}).get("diverged")
        told = f"collapsed: {job.title}" + (f" ({reason})" if reason else "") + "; it is in no mean"
        if job.settings["config"]["on_spike"] == "skip":
            return f"{told}, although spikes were skipped"
        return f"{told}, and is run again with on_spike: skip" if self.repeat_collapsed else told

    def progress(self, job: Job) -> str:
        """finished, begun or new."""
        if self.is_done(job):
            return "finished"
        begun = job.kind != "speed" and (job.folder(self.out) / "config.yaml").exists()
        return "begun" if begun else "new"

    def run(
        self,
        say: Callable[[str], None],
        jobs: int | None = None,
        time_limit: float | None = None,
        at_once: bool = False,
    ) -> StudyOutcome:
        """Run everything that is not done: speeds that equal-time runs wait for, sweeps, training, the other
        speeds."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        width = jobs or max(gpus, 1)
        begun, finished, lost = time.monotonic(), 0, False
        alone = width <= max(gpus, 1)
        plan = self.plan()

        def done(job: Job) -> None:
            nonlocal finished, lost
            finished += 1
            record_job(job, self.out, self.results, alone)
            if "tunes" not in job.settings and self._collapsed(job.key):
                lost = True
                say(self._tell_collapse(job))
            if "tunes" in job.settings:
                drop_weights(job.folder(self.out))
            collect(plan, self.out, self.results, self.command)

        queue = Queue(
            self.out, say, done, self.estimate(self.device), width, _devices(gpus),
            isolated=gpus > 0 or width > 1, at_once=at_once,
            until=begun + time_limit if time_limit else float("inf"),
        )  # fmt: skip
        queue.run(plan.speed_first(), alone=True)

        def ready() -> list[Job]:
            """The runs that sweeps wait for, and those whose settings are known by now. Each sweep goes on, and is
            followed by its model's runs, whatever the others do. Without sweeps all settings are known; but
            nothing goes on from a run that collapsed, and it may be repeated."""
            nonlocal plan
            if self.scale.tune or lost:
                plan = self._plan_with_records()
            return [*self._next_of_sweeps(plan), *self.todo(plan)]

        plan = self._plan_with_records()
        queue.run(ready(), more=ready)
        if self.speed:
            queue.run(plan.speed, alone=True)
        plan = self.plan()
        for trial in (trial for trial in plan.trials if trial.is_lost):
            say(f"left out: {trial.label}, {trial.size}, seed {trial.seed}, as what it goes on from collapsed")
        results = collect(plan, self.out, self.results, self.command)
        for job in self._never_measured(plan):
            if job.key not in queue.failed:
                queue.fail(
                    job, f"it has ended, but no evaluation worked; remove {job.folder(self.out)} to repeat it"
                )
        return StudyOutcome(finished, queue.failed, queue.left, queue.stopped, len(results))


def _devices(gpus: int) -> list[str]:
    import os

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(gpus)]


@dataclass(frozen=True)
class Device:
    """`flops` it reaches in training, and seconds that every run costs beside it."""

    name: str
    flops: float
    start: float


def this_device() -> Device:
    import torch

    if torch.cuda.is_available():
        return find_device(device_name())
    return Device(device_name(), CPU_FLOPS * torch.get_num_threads(), CPU_START)


def find_device(name: str) -> Device:
    """A GPU by a part of its name."""
    peak = peak_flops(name)
    if peak is None:
        raise UserError(f"the peak of {name!r} is not known; {choose_one(name, PEAK_BF16)}")
    return Device(name, USE_OF_PEAK * peak, GPU_START)


def make_estimate(on: Device, vocabulary: Any, measured: Callable[[Any], float | None]) -> Callable[[Job], float]:
    """A function that gives a job's seconds. `measured(config)` is a known speed, in sequences a second."""

    def estimate(job: Job) -> float:
        if job.kind == "speed":
            on_gpu = on.start == GPU_START
            return len(job.settings["configs"]) * (COMPARISON if on_gpu else 3.0)
        if job.kind == "finetune":
            return on.start + job.sequences / speeds.get(job.settings["of"], 1e3) + _decoding(on)
        speed = _speed(job, on, vocabulary, measured)
        speeds[job.key] = speed
        return on.start + job.sequences / speed

    speeds: dict[str, float] = {}
    return estimate


def _decoding(on: Device) -> float:
    return DECODING if on.start == GPU_START else 2.0


def _speed(job: Job, on: Device, vocabulary: Any, measured: Callable[[Any], float | None]) -> float:
    from altup.models.accounting import account
    from altup.training.pretraining import PretrainConfig

    config = PretrainConfig.from_dict(job.settings["config"], job.title)
    if known := measured(config):
        return known
    targets = objective_of(config, vocabulary).targets
    return on.flops / account(config.model_config(vocabulary), config.inputs_length, targets).flops_train
