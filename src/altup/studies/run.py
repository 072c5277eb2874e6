"""Runs studies: what is finished is not repeated, what was stopped goes on, and results add up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.studies.collect import collect, record_job
from altup.studies.estimate import Machine, make_estimate, this_machine
from altup.studies.inputs import Inputs, identify, imagine
from altup.studies.plan import Job, Plan, SpeedFacts, make_plan, run_folder, speed_key
from altup.studies.queue import Queue
from altup.studies.results import Result, read_results, read_run_record
from altup.studies.scale import Scale
from altup.studies.study import Study
from altup.studies.work import SPEED, is_done, read_speed


@dataclass(frozen=True)
class Outcome:
    """How running went: jobs finished now, keys that failed or were left for another time, rows written."""

    finished: int
    failed: list[str]
    left: list[str]
    stopped: bool
    rows: int


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
    imagined: bool = False  # nothing is run, so that text need not be there

    @cached_property
    def inputs(self) -> Inputs:
        """The text and tasks; the smoke scale makes its own."""
        if self.tasks is not None and not Path(self.tasks).is_dir():
            raise UserError(f"--tasks {self.tasks}: no such folder; give one with SUITE/TASK/SPLIT.jsonl files")
        if self.data is not None:
            return identify(self.data, self.tasks)
        if self.scale.data != "embedded" and self.imagined:
            return imagine(self.tasks)
        if self.scale.data != "embedded":
            raise UserError(
                f"scale {self.scale.name} needs text: `altup prepare FILES --out DIR`, then --data DIR"
                + ("" if self.scale.base == "smoke" else "; `--scale smoke` brings its own")
            )
        from altup.studies.smoke import prepare_tasks, prepare_text

        data = prepare_text(self.out / "data", self.scale.vocab_size)
        return identify(str(data), self.tasks or str(prepare_tasks(self.out / "data")))

    @cached_property
    def machine(self) -> Machine:
        return this_machine()

    @cached_property
    def _earlier(self) -> list[Result]:
        """What the results folder held at the start."""
        return read_results(self.results)

    @cached_property
    def _earlier_speeds(self) -> dict[str, SpeedFacts]:
        found: dict[str, dict[str, float]] = {}
        for result in self._earlier:
            if result.metric in ("train_seq_per_s", "relative_speed"):
                found.setdefault(result.run, {})[result.metric] = result.value
        return {
            key: SpeedFacts(v["train_seq_per_s"], v["relative_speed"]) for key, v in found.items() if len(v) == 2
        }

    def speeds(self) -> dict[str, SpeedFacts]:
        """Measured speeds by key, from earlier results and from this folder."""
        here = {
            path.stem: SpeedFacts(train["seq_per_s"], train["relative"])
            for path in (self.out / SPEED).glob("*.json")
            if (found := read_speed(self.out, path.stem))
            for train in [found["train"]]
        }
        return {**self._earlier_speeds, **here}

    def chosen_steps(self, study: Study, label: str, size: str) -> int | None:
        """The steps of an equal-time run made before: other seeds take as many."""
        for r in read_results(self.results):
            own = (r.study, r.label, r.size, r.scale, r.data, r.hardware)
            wanted = (study.name, label, size, self.scale.name, self.inputs.identity, self.machine.name)
            if r.metric == "steps" and own == wanted:
                return round(r.value)
        return None

    def plan(self) -> Plan:
        return make_plan(
            self.studies, self.scale, self.inputs, seeds=self.seeds, only=self.only,
            finetune=self.finetune and (self.inputs.tasks is not None or self.scale.base == "paper"),
            speeds=self.speeds(), chosen_steps=self.chosen_steps, machine=self.machine.name,
        )  # fmt: skip

    def estimate(self, on: Machine) -> Callable[[Job], float]:
        vocabulary, speeds = self.inputs.vocabulary, self.speeds()
        full_names = sorted({r.hardware for r in self._earlier if on.name.lower() in r.hardware.lower()})

        def speed_of(config: Any) -> float | None:
            keys = [speed_key(config, vocabulary.padded_size, name) for name in (on.name, *full_names)]
            return next((speeds[key].seq_per_s for key in keys if key in speeds), None)

        return make_estimate(on, vocabulary, speed_of)

    def is_done(self, job: Job) -> bool:
        return is_done(job, self.out) or read_run_record(self.results, job.key) is not None

    def todo(self, plan: Plan) -> list[Job]:
        """The training jobs that are not done; what is to be fine-tuned must be there, not only its record."""
        pending = [job for job in plan.training() if not self.is_done(job)]
        needed = {need for job in pending for need in job.needs}
        return [
            job for job in plan.training()
            if job in pending or (job.key in needed and not is_done(job, self.out))
        ]  # fmt: skip

    def progress(self, job: Job) -> str:
        """finished, begun or new."""
        if self.is_done(job):
            return "finished"
        begun = job.kind != "speed" and (run_folder(self.out, job) / "config.yaml").exists()
        return "begun" if begun else "new"

    def run(self, say: Callable[[str], None], jobs: int | None = None, time_limit: float | None = None) -> Outcome:
        """Everything that is not done: speeds that equal-time runs wait for, training, the other speeds."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        width = jobs or max(gpus, 1)
        begun, finished = time.monotonic(), 0
        alone = width <= max(gpus, 1)

        def done(job: Job) -> None:
            nonlocal finished
            finished += 1
            record_job(job, self.out, self.results, alone)
            collect(self.plan(), self.out, self.results, self.command)

        queue = Queue(
            self.out, say, done, self.estimate(self.machine), width, _devices(gpus),
            isolated=gpus > 0 or width > 1, until=begun + time_limit if time_limit else float("inf"),
        )  # fmt: skip
        plan = self.plan()
        waited_for = {key for cell in plan.cells if cell.waits for key in cell.waits_for}
        first = [job for job in plan.speed if waited_for.intersection(job.settings["configs"])]
        queue.run(first, alone=True)
        plan = self.plan()
        for job in plan.training():
            record_job(job, self.out, self.results, alone=False)
        queue.run(self.todo(plan))
        if self.speed:
            queue.run(plan.speed, alone=True)
        rows = collect(self.plan(), self.out, self.results, self.command)
        return Outcome(finished, queue.failed, queue.left, queue.stopped, len(rows))


def _devices(gpus: int) -> list[str]:
    import os

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(gpus)]
