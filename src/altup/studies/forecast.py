"""What a run of studies would cost: every job with its state, steps and estimated time (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from altup.core.text import number_of
from altup.studies.jobs import Job
from altup.studies.plan import Plan, Trial
from altup.studies.run import Device, StudyRun


@dataclass(frozen=True)
class Line:
    """A job, or the `runs` that a sweep needs at most; `seconds` are 0 where it is finished. `least` are those
    of a sweep that ends where it began."""

    title: str
    state: str
    steps: str
    seconds: float
    least: float | None = None
    runs: int = 1


def forecast(studies: StudyRun, plan: Plan, on: Device) -> list[Line]:
    """Sweeps, what is known of training, speeds, and what waits for sweeps or speeds, on a device."""
    estimate = studies.estimate(on)
    waiting = list(_waiting_jobs(plan))
    ahead = _parents_ahead(studies, plan, {job.key for _, job in waiting})
    speed = plan.speed if studies.speed or any(t.waits and t.waits_for for t in plan.trials) else []
    todo = {job.key for job in (*studies.todo(plan), *ahead, *speed)}
    lines = list(_sweep_lines(plan, estimate))
    for job in (*plan.training(), *ahead, *speed):
        seconds, pending, state = estimate(job), job.key in todo, studies.progress(job)
        state = "again, for its model" if pending and state == "finished" else state
        lines.append(Line(job.title, state, f"{job.steps:,}" if job.steps else "", seconds if pending else 0.0))
    for trial, job in waiting:
        column = job.settings.get("column")
        by_speed = trial.is_timed and not column
        minutes = studies.scale.minutes if trial.study.equal_time and by_speed else None
        seconds = on.start + 60 * minutes if minutes else estimate(job)
        title = f"{trial.study.name}: {trial.label}, {trial.size}, seed {trial.seed}"
        title = f"{title} on {column}" if column else title
        lines.append(Line(title, "new", "by its speed" if by_speed else f"{job.steps:,}", seconds))
    return lines


def _sweep_lines(plan: Plan, estimate: Callable[[Job], float]) -> Iterable[Line]:
    for sweep in (sweep for sweep in plan.sweeps() if not sweep.is_stuck):
        for verb, part in (("tuning", sweep), ("settling", sweep.settling)):
            if part is None or not part.runs_left[1]:
                continue
            (least, most), seconds = part.runs_left, estimate(part.first)
            told = number_of(most, "run") if least == most else f"{least} to {most} runs"
            state, steps = "begun" if part.runs else "new", f"{most} × {part.first.steps:,}"
            yield Line(f"{verb} {sweep.title}: {told}", state, steps, most * seconds, least * seconds, most)


def _waiting_jobs(plan: Plan) -> Iterable[tuple[Trial, Job]]:
    """Trials that have no jobs yet, each with jobs of about the same time; models that studies share are trained
    once, and fine-tuned once."""
    seen: set[str] = set()
    for trial in plan.trials:
        if not trial.waits:
            continue
        for job in trial.as_long_as:
            if trial.is_timed or job.key not in seen:
                seen.add(job.key)
                yield trial, job


def _parents_ahead(studies: StudyRun, plan: Plan, known: set[str]) -> list[Job]:
    """The runs that sweeps and waiting trials will go on from, but for those that are counted elsewhere."""
    counted = known | {job.key for job in studies.todo(plan)}
    return [job for job in plan.parents_ahead() if job.key not in counted and not job.is_done(studies.out)]
