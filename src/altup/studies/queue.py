"""Runs jobs: in this process one after the other, or several at a time, each in a process of its own."""

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
from typing import IO, Any, Protocol

from altup.core.console import lasting_stream
from altup.core.errors import UserError
from altup.core.hardware import usable_cores
from altup.studies.jobs import Job
from altup.studies.results import write_json
from altup.studies.work import do_job
from altup.training.preemption import GPU_LOCK, STOPPED, handle_signals
from altup.training.run_folder import RunFolder

PAUSE = 0.2  # seconds between two checks of running processes


class Process(Protocol):
    """A started process, as `subprocess.Popen` is one."""

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass(frozen=True)
class Started:
    """A job that runs, and on which device since when."""

    job: Job
    device: str | None
    since: float


def start_process(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> Process:
    """`altup arguments…` in a session of its own: Ctrl-C is for this process, which passes it on once.

    It saves and ends with this process, even if that one is killed: its stdin ends then.
    """
    command = [sys.executable, "-m", "altup", *arguments, "--until-stdin-ends"]
    return subprocess.Popen(
        command, stdin=_until_we_end(), stdout=log, stderr=log, env=environment, start_new_session=True
    )


@functools.cache
def _until_we_end() -> int:
    """The read end of a pipe that ends when this process does: nobody else gets its write end."""
    return os.pipe()[0]


@dataclass
class Queue:
    """Where jobs run. `isolated` jobs have a process each, on the devices in turn; the others run here.

    Jobs that share a device start and compile at the same time, and train one after the other, or `at_once`. A
    comparison of speed has the machine for itself. A job is not started if `estimate` says that it would end after
    `until` (a time of `time.monotonic`); processes that still run then are asked to save and stop. `done` is
    called with every job that finished, `failed` with every other one and the reason. `watch` sees those that run.
    """

    out: Path
    results: Path
    say: Callable[[str], None]
    done: Callable[[Job], None] = lambda job: None
    failed: Callable[[Job, str], None] = lambda job, reason: None
    estimate: Callable[[Job], float] = lambda job: 0.0
    watch: Callable[[Sequence[Job]], None] = lambda jobs: None
    width: int = 1
    devices: Sequence[str] = ()
    isolated: bool = False
    at_once: bool = False
    until: float = float("inf")
    start: Callable[[list[str], dict[str, str], IO[bytes]], Process] = start_process
    finished: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    remaining: dict[str, Job] = field(default_factory=dict)  # stopped, or not started in time
    stopped: bool = False
    _tried: set[str] = field(default_factory=set)
    _waited: set[str] = field(default_factory=set)  # jobs of which was said that another process has them

    def run(self, todo: Callable[[], Sequence[Job]]) -> None:
        """Run what `todo` lists, and ask it again whenever a job has ended, until it lists nothing new."""
        running: dict[Process, Started] = {}
        free = [self.devices[i % len(self.devices)] if self.devices else None for i in range(self.width)]
        waiting = self._untried(todo())
        with signals_as_interrupt():
            try:
                while waiting or running:
                    while not self.stopped and free and (job := self._next(waiting, running, free[0])):
                        waiting.remove(job)
                        self._tried.add(job.key)
                        self.say(f"{time.strftime('%H:%M:%S')} {len(self._tried)}. {job.title}")
                        if self.isolated:
                            device = free.pop(0)
                            running[self._start(job, device)] = Started(job, device, time.monotonic())
                        else:
                            self._run_here(job)
                            waiting = self._untried(todo())
                    if self.stopped or not (running or any(self._is_elsewhere(job) for job in waiting)):
                        break
                    self.watch([started.job for started in running.values()])
                    time.sleep(PAUSE)
                    ended = [process for process in running if process.poll() is not None]
                    for process in ended:
                        started = running.pop(process)
                        free.append(started.device)
                        self._finish(started.job, process.returncode)
                    if ended:
                        waiting = self._untried(todo())
                    if time.monotonic() > self.until:
                        self.remaining |= {job.key: job for job in waiting}
                        waiting = []
                        self._stop(running)
            except KeyboardInterrupt:
                self.stopped = True
            self._stop(running)
        self.remaining |= {job.key: job for job in waiting}

    def _untried(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if job.key not in self._tried]

    def _next(self, waiting: Sequence[Job], running: dict[Process, Started], device: str | None) -> Job | None:
        """The first job that may start now."""
        jobs = [started.job for started in running.values()]
        if any(job.kind == "speed" for job in jobs):
            return None
        ahead = self._seconds_ahead([s for s in running.values() if s.device == device]) if device else 0.0
        for job in waiting:
            is_late = time.monotonic() + ahead + self.estimate(job) > self.until
            if not (is_late or (job.kind == "speed" and jobs) or self._is_elsewhere(job)):
                return job
        return None

    def _is_elsewhere(self, job: Job) -> bool:
        """Whether a process that is not of this queue trains it; one that a killed command left ends by itself."""
        if time.monotonic() > self.until or job.kind == "speed" or not RunFolder(job.folder(self.out)).is_locked:
            return False
        if job.key not in self._waited:
            self._waited.add(job.key)
            self.say(f"waiting for another process that trains {job.title}")
        return True

    def _seconds_ahead(self, sharing: Sequence[Started]) -> float:
        """Seconds until a device has done the jobs that run on it: in turns the first trains, at once each has its
        share of the time."""
        now, share = time.monotonic(), len(sharing) if self.at_once else 1
        each = [max(0.0, self.estimate(one.job) - (now - one.since) / share) for one in sharing]
        return sum(each) if self.at_once else sum(each[:1]) + sum(self.estimate(one.job) for one in sharing[1:])

    def log(self, job: Job) -> Path:
        path = self.out / "logs" / f"{job.key}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _run_here(self, job: Job) -> None:
        try:
            with self.log(job).open("ab") as log, contextlib.redirect_stderr(lasting_stream(log.fileno())):
                finished = do_job(job, self.out, self.results, alone=True)
        except UserError as error:
            self._fail(job, str(error))
            return
        except KeyboardInterrupt:
            finished = False
        if finished:
            self._complete(job)
        else:
            self.stopped = True
            self.remaining[job.key] = job

    def _complete(self, job: Job) -> None:
        self.finished.append(job.key)
        self.done(job)

    def _fail(self, job: Job, reason: str) -> None:
        self.failures.append(job.key)
        self.say(f"failed: {job.title}: {reason}")
        self.failed(job, reason)

    def _start(self, job: Job, device: str | None) -> Process:
        described = self.log(job).with_suffix(".json")
        write_json(described, asdict(job))
        environment = dict(os.environ)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
            if not self.at_once:
                environment[GPU_LOCK] = str(self.out / "turns" / device)
        elif self.width > 1:  # they share the cores, and more threads than cores wait for each other
            environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self.width)))
        arguments = ["study", "work", str(described), "--out", str(self.out), "--results", str(self.results)]
        if self.width <= max(len(self.devices), 1):
            arguments.append("--alone")
        with self.log(job).open("ab") as log:
            return self.start(arguments, environment, log)

    def _finish(self, job: Job, code: int) -> None:
        if code == 0:
            self._complete(job)
        elif code in (STOPPED, -signal.SIGTERM):  # it saved, or had not yet begun to train
            self.remaining[job.key] = job
        else:
            lines = self.log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self._fail(job, f"{lines[-1] if lines else f'exit code {code}'} ({self.log(job)})")

    def _stop(self, running: dict[Process, Started]) -> None:
        """Ask the running ones to save and stop, and wait for them."""
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process, started in list(running.items()):
            self._finish(started.job, process.wait())
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
