"""Runs jobs: one in this process, or many, in sequence or several at a time, each in its own process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from altup.core.console import lasting_stream
from altup.core.errors import DivergedError, UserError
from altup.core.hardware import usable_cores
from altup.studies.jobs import DIVERGED, Job, speed_file
from altup.studies.results import origin, write_json
from altup.training.preemption import GPU_LOCK, STOPPED, handle_signals
from altup.training.run_folder import RunFolder

if TYPE_CHECKING:
    from altup.training.loop import TrainOutcome

PAUSE = 0.2  # seconds between two checks of running processes


class Process(Protocol):
    """A started process, as `subprocess.Popen` is one."""

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


Running = dict[Process, tuple[Job, str | None]]  # and the device


def start_process(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> Process:
    """`altup arguments…` in a session of its own: Ctrl-C is for this process, which passes it on once.

    It saves and ends with this process, even if that one is killed: its stdin ends then.
    """
    command = [sys.executable, "-m", "altup", *arguments, "--until-stdin-ends"]
    return subprocess.Popen(
        command, stdin=_while_we_live(), stdout=log, stderr=log, env=environment, start_new_session=True
    )


@functools.cache
def _while_we_live() -> int:
    """The read end of a pipe that ends when this process does: nobody else gets its write end."""
    return os.pipe()[0]


def do_job(job: Job, out: Path) -> bool:
    """Run or resume a job; False if a signal stopped it first."""
    return {"pretrain": _pretrain, "finetune": _finetune, "speed": _speed}[job.kind](job, out)


def _pretrain(job: Job, out: Path) -> bool:
    from altup.studies.starts import begin
    from altup.training.pretraining import PretrainConfig, pretrain

    config = PretrainConfig.from_dict(job.settings["config"], job.title)
    begin(job, config, out)
    with _noting_divergence(job, out):
        return _is_measured(job, pretrain(config, job.folder(out), resume=True, stop_collapsed=True))
    return True


def _finetune(job: Job, out: Path) -> bool:
    from altup.finetuning.config import FinetuneConfig
    from altup.finetuning.finetune import finetune
    from altup.studies.starts import trained_folder

    trained = trained_folder(job, job.settings["of"], out)
    config = FinetuneConfig.from_dict({**job.settings["config"], "model": str(trained)}, job.title)
    with _noting_divergence(job, out):
        return _is_measured(job, finetune(config, job.folder(out), resume=True))
    return True


@contextlib.contextmanager
def _noting_divergence(job: Job, out: Path) -> Iterator[None]:
    """A run that has diverged is done: its folder says why, and it is not tried again."""
    try:
        yield
    except DivergedError as error:
        write_json(job.folder(out) / DIVERGED, {"reason": str(error)})


def _is_measured(job: Job, outcome: TrainOutcome) -> bool:
    """Whether a run has ended, if it has: one whose last evaluation failed has no result."""
    if outcome.finished and (not outcome.evaluation or outcome.evaluation["step"] != outcome.step):
        raise UserError(
            f"{job.title}: its last evaluation failed, so it has no result; its metrics.jsonl says why"
        )
    return outcome.finished


def _speed(job: Job, out: Path) -> bool:
    from altup.studies.speed import measure_speed
    from altup.training.pretraining import PretrainConfig

    settings = dict(job.settings)
    configs = {key: PretrainConfig.from_dict(values, job.title) for key, values in settings.pop("configs").items()}
    measured = measure_speed(configs, **settings)
    base = next(iter(configs))
    for key, found in measured.items():
        path = speed_file(out, key)
        if key == base and path.exists():
            continue  # what it was first measured as is what others were compared with
        write_json(path, {**asdict(found), "base": base, **origin(), "settings": settings}, indent=1)
    return True


@dataclass
class Queue:
    """Where jobs run. `isolated` jobs have a process each, on the devices in turn; the others run here.

    Jobs that share a device start and compile at the same time, and train one after the other, or `at_once`.

    A job is not started if `estimate` says that it would end after `until` (a time of `time.monotonic`). Processes
    that still run then are asked to save and stop. `done` is called with every job that finished. `ended` are the
    keys of all that were tried.
    """

    out: Path
    say: Callable[[str], None]
    done: Callable[[Job], None]
    estimate: Callable[[Job], float] = lambda job: 0.0
    width: int = 1
    devices: Sequence[str] = ()
    isolated: bool = False
    at_once: bool = False
    until: float = float("inf")
    start: Callable[[list[str], dict[str, str], IO[bytes]], Process] = start_process
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    stopped: bool = False
    _number: int = 0
    _since: dict[str, float] = field(default_factory=dict)  # the job that trains on a device does
    _begun: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)  # of jobs that wait for a process of others

    def run(self, jobs: Sequence[Job], alone: bool = False, more: Callable[[], list[Job]] | None = None) -> None:
        """Run all jobs in order, `width` at a time, or one if they must be `alone`; failures are noted. When one
        has ended, those that `more` gives take the place of the ones that wait."""
        if self.stopped:
            self.left += [job.key for job in jobs]
        elif self.isolated:
            self._run_processes(list(jobs), 1 if alone else self.width, more)
        else:
            self._run_in_turn(list(jobs), more)

    def _run_in_turn(self, waiting: list[Job], more: Callable[[], list[Job]] | None) -> None:
        while waiting:
            job = waiting.pop(0)
            if self.stopped or not self._wait_for_others(job):
                self._leave(job)
            elif self._may_start(job):
                self._announce(job)
                self._run_here(job)
                if more and not self.stopped:
                    waiting = self._not_tried(more())

    def _not_tried(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if job.key not in self.ended]

    def _leave(self, job: Job) -> None:
        self.ended.add(job.key)
        self.left.append(job.key)

    def _may_start(self, job: Job) -> bool:
        if any(need in self.failed for need in job.needs):
            self.ended.add(job.key)
            self.failed.append(job.key)
            self.say(f"left out: {job.title}, because its model failed")
            return False
        if self._is_too_late(job) or any(need in self.left for need in job.needs):
            self._leave(job)
            return False
        return True

    def _has_another_process(self, job: Job) -> bool:
        """Whether a job must wait for a process that is not of this queue."""
        if job.kind == "speed" or not RunFolder(job.folder(self.out)).is_locked:
            return False
        if job.key not in self._told:
            self._told.add(job.key)
            self.say(
                f"waiting for another process that trains {job.title}; one that a killed `altup study run` left "
                "saves and ends by itself"
            )
        return True

    def _wait_for_others(self, job: Job) -> bool:
        """Whether the job is free; False if a signal or the time limit came first."""
        try:
            with signals_as_interrupt():
                while self._has_another_process(job):
                    if self._is_too_late(job):
                        return False
                    time.sleep(PAUSE)
        except KeyboardInterrupt:
            self.stopped = True
        return not self.stopped

    def _is_too_late(self, job: Job, ahead: float = 0) -> bool:
        """`ahead` are the seconds that others will take first."""
        return time.monotonic() + ahead + self.estimate(job) > self.until

    def _announce(self, job: Job) -> None:
        self._number += 1
        self.say(f"{time.strftime('%H:%M:%S')} {self._number}. {job.title}")

    def log(self, job: Job) -> Path:
        path = self.out / "logs" / f"{job.key}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _run_here(self, job: Job) -> None:
        try:
            with (
                self.log(job).open("ab") as log,
                contextlib.redirect_stderr(lasting_stream(log.fileno())),
                signals_as_interrupt(),
            ):
                finished = do_job(job, self.out)
        except UserError as error:
            self.fail(job, str(error))
            return
        except KeyboardInterrupt:
            finished = False
        if finished:
            self._complete(job)
        else:
            self.stopped = True
            self._leave(job)

    def _complete(self, job: Job) -> None:
        """What cannot be recorded has failed; the others go on."""
        self.ended.add(job.key)
        try:
            self.done(job)
        except UserError as error:
            self.fail(job, str(error))

    def fail(self, job: Job, reason: str) -> None:
        """Note that a job has failed, and say why."""
        self.ended.add(job.key)
        self.failed.append(job.key)
        self.say(f"failed: {job.title}: {reason}")

    def _run_processes(self, waiting: list[Job], width: int, more: Callable[[], list[Job]] | None) -> None:
        running: Running = {}
        free = [self.devices[i % len(self.devices)] if self.devices else None for i in range(width)]
        with signals_as_interrupt():
            try:
                while waiting or running:
                    while free and (job := self._next(waiting, running, free[0])):
                        self._announce(job)
                        device = free.pop(0)
                        if device is not None and not self._sharing(running, device):
                            self._since[device] = time.monotonic()
                        self._begun[job.key] = time.monotonic()
                        running[self._start(job, device, width)] = job, device
                    if not running and not self._must_wait(waiting):
                        break
                    time.sleep(PAUSE)
                    for process in (over := [p for p in running if p.poll() is not None]):
                        job, device = running.pop(process)
                        free.append(device)
                        if device is not None:
                            self._since[device] = time.monotonic()
                        self._finish(job, process.returncode)
                    if over and more:
                        busy = {job.key for job, _ in running.values()}
                        waiting = [job for job in self._not_tried(more()) if job.key not in busy]
                    if time.monotonic() > self.until:
                        self._stop(running)
            except KeyboardInterrupt:
                self.stopped = True
                self._stop(running)
        self.left += [job.key for job in waiting]

    def _next(self, waiting: list[Job], running: Running, device: str | None) -> Job | None:
        """The first job whose needs are met and which may start; those that may not are taken off the list."""
        busy = {job.key for job, _ in running.values()}
        ahead = 0.0
        if device is not None and (sharing := self._sharing(running, device)):
            ahead = self._left_on_device(sharing, device)
        for job in list(waiting):
            if busy.intersection(job.needs) or any(other.key in job.needs for other in waiting):
                continue
            if ahead and self._is_too_late(job, ahead):
                continue  # it may fit once those before it have ended
            if self._has_another_process(job):
                continue
            waiting.remove(job)
            if self._may_start(job):
                return job
        return None

    def _must_wait(self, waiting: list[Job]) -> bool:
        return any(self._has_another_process(job) and not self._is_too_late(job) for job in waiting)

    def _sharing(self, running: Running, device: str) -> list[Job]:
        """The jobs on a device. The first trains, since `_since`, and the others wait for their turns."""
        return [job for job, where in running.values() if where == device]

    def _left_on_device(self, sharing: list[Job], device: str) -> float:
        """Seconds until a device has done the jobs that run on it. At once, each has its share of the time."""
        now = time.monotonic()
        if self.at_once:
            done = {job.key: (now - self._begun[job.key]) / len(sharing) for job in sharing}
            return sum(max(0.0, self.estimate(job) - done[job.key]) for job in sharing)
        first, *others = [self.estimate(job) for job in sharing]
        return max(0.0, first - (now - self._since[device])) + sum(others)

    def _start(self, job: Job, device: str | None, width: int) -> Process:
        described = self.log(job).with_suffix(".json")
        write_json(described, asdict(job))
        environment = dict(os.environ)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
            if not self.at_once:
                environment[GPU_LOCK] = str(self.out / "turns" / device)
        elif width > 1:  # they share the cores, and more threads than cores wait for each other
            environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // width)))
        with self.log(job).open("ab") as log:
            return self.start(["study", "work", str(described), "--out", str(self.out)], environment, log)

    def _finish(self, job: Job, code: int) -> None:
        if code == 0 and job.is_done(self.out):
            self._complete(job)
        elif code in (STOPPED, -signal.SIGTERM):  # it saved, or had not yet begun to train
            self._leave(job)
        else:
            lines = self.log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.fail(job, f"{lines[-1] if lines else f'exit code {code}'} ({self.log(job)})")

    def _stop(self, running: Running) -> None:
        """Ask the running ones to save and stop, and wait for them."""
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process, (job, _) in list(running.items()):
            self._finish(job, process.wait())
            running.pop(process)


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and the others as Ctrl-C, so that all of them stop the running processes in the same way."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = handle_signals(interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
