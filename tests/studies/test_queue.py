"""The queue: processes that take turns, time limits, and what a signal leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from altup.core.files import Lock
from altup.core.hardware import usable_cores
from altup.studies.jobs import Job
from altup.studies.queue import Process, Queue, start_process
from altup.studies.results import write_json
from altup.studies.scale import Scale, with_settings
from altup.training.run_folder import RunFolder
from tests.processes import PATIENCE, Running, wait_until
from tests.studies.samples import first_jobs, silent
from tests.studies.workers import FORKSERVER, fork_workers


def test_what_the_time_limit_stops_and_all_behind_it_is_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    jobs = first_jobs(tmp_path, with_settings(scale, {"steps": 50_000}), data, seeds=[0, 1])
    queue = Queue(
        tmp_path, tmp_path / "results", silent, width=2, isolated=True, until=time.monotonic() + 1,
        start=fork_workers(),
    )  # fmt: skip
    queue.run(lambda: jobs)
    assert (len(jobs), sorted(queue.remaining)) == (4, sorted(job.key for job in jobs))


@pytest.mark.parametrize(("width", "devices", "given", "threads"), [
    (2, [], None, str(max(1, usable_cores() // 2))), (1000, [], None, "1"), (2, [], "3", "3"), (1, [], None, None),
    (2, ["0"], None, None),
])  # fmt: skip
def test_processes_on_a_cpu_share_its_cores(
    width: int, devices: list[str], given: str | None, threads: str | None, scale: Scale, data: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Unless the user has given them threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    seen = []

    def start(arguments: list[str], environment: dict[str, str], log: Any) -> Process:
        seen.append(environment.get("OMP_NUM_THREADS"))
        return subprocess.Popen(["true"])

    jobs = first_jobs(tmp_path, scale, data)
    queue = Queue(
        tmp_path,
        tmp_path / "results",
        print,
        width=width,
        devices=devices,
        isolated=True,
        at_once=True,
        start=start,
    )
    queue.run(lambda: jobs)
    assert set(seen) == {threads}


def run_in_own_group(jobs: list[Job], out: Path) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = fork_workers(multiprocessing.get_context("fork"))
    queue = Queue(out, out / "results", print, width=2, devices=["0"], isolated=True, start=workers)
    queue.run(lambda: jobs)
    assert sorted(queue.remaining) == sorted(job.key for job in jobs)


def test_jobs_of_one_device_take_turns_and_ctrl_c_loses_nothing(scale: Scale, data: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to every process of its group."""
    settings = {"steps": 50_000, "save_every": 50_000, "eval_every": 50_000, "log_every": 1}
    jobs = first_jobs(tmp_path, with_settings(scale, settings), data)
    running = FORKSERVER.Process(target=run_in_own_group, args=(jobs, tmp_path))
    running.start()

    def said(words: str) -> int:
        return sum(words in path.read_text() for path in tmp_path.glob("logs/*.log"))

    Running(running, tmp_path).wait_until(lambda: said("step 20/") and said("waiting for its turn"), "a turn")
    assert said("step 2/") == 1
    os.killpg(running.pid, signal.SIGINT)
    running.join(PATIENCE)
    assert running.exitcode == 0
    saved = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("runs/*/checkpoints/step-*"))
    assert (len(saved), saved[0]) == (2, 1)
    assert saved[1] >= 20


def test_jobs_of_one_device_train_at_once_where_asked(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Another run has the turn all the while, and they do not wait for it."""
    jobs = first_jobs(tmp_path, scale, data)
    queue = Queue(
        tmp_path, tmp_path / "results", silent, width=2, devices=["0"], isolated=True, at_once=True,
        start=fork_workers(),
    )  # fmt: skip
    (tmp_path / "turns").mkdir()
    turn = Lock(tmp_path / "turns" / "0")
    assert turn.acquire()
    queue.run(lambda: jobs)
    turn.release()
    assert (len(jobs), queue.remaining, queue.failures) == (2, {}, [])


@pytest.mark.parametrize("at_once", [False, True])
def test_what_waits_on_one_device_is_counted_by_the_time_limit(
    scale: Scale, data: Path, tmp_path: Path, at_once: bool
) -> None:
    """Each is thought to take 1000 s of the 2500 there are, so the third begins when others have ended sooner."""
    jobs = first_jobs(tmp_path, scale, data, seeds=[0, 1])[:3]
    events: list[str] = []
    queue = Queue(
        tmp_path, tmp_path / "results", lambda text: events.append("begins"), lambda job: events.append("ends"),
        estimate=lambda job: 1000, width=3, devices=["0"], isolated=True, at_once=at_once,
        until=time.monotonic() + 2500, start=fork_workers(),
    )  # fmt: skip
    queue.run(lambda: jobs)
    assert events[:3] == ["begins", "begins", "ends"]
    assert (events.count("begins"), events.count("ends"), queue.remaining) == (3, 3, {})


class Stub:
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        return self.returncode or 0

    def send_signal(self, number: int, /) -> None: ...


def test_what_becomes_ready_does_not_wait_for_the_slow_ones(tmp_path: Path) -> None:
    """Two sweeps: the next run of the fast one begins while the first of the slow one still runs."""
    processes: dict[str, Stub] = {}

    def start(arguments: list[str], environment: dict[str, str], log: Any) -> Stub:
        key = Path(arguments[2]).stem
        processes[key] = Stub()
        if key == "fast-2":
            assert processes["slow-1"].returncode is None
            processes["slow-1"].returncode = 1
        if key != "slow-1":
            processes[key].returncode = 1
        return processes[key]

    slow, fast, second = (Job("pretrain", key, key, {}) for key in ("slow-1", "fast-1", "fast-2"))
    queue = Queue(tmp_path, tmp_path / "results", silent, width=2, isolated=True, start=start)
    queue.run(lambda: [slow, *([second] if "fast-1" in queue.failures else [fast])])
    assert sorted(queue.failures) == ["fast-1", "fast-2", "slow-1"]


def test_a_comparison_of_speed_has_the_machine_for_itself(tmp_path: Path) -> None:
    running: list[Stub] = []

    def start(arguments: list[str], environment: dict[str, str], log: Any) -> Stub:
        own = Stub()
        own.returncode = 0
        is_speed = "speed" in Path(arguments[2]).stem
        assert not running or (not is_speed and not running[0].is_speed)
        own.is_speed = is_speed
        return own

    jobs = [
        Job("pretrain", "a", "a", {}),
        Job("speed", "speed-1", "s", {"configs": {}}),
        Job("pretrain", "b", "b", {}),
    ]
    done: list[str] = []
    queue = Queue(
        tmp_path, tmp_path, silent, lambda job: done.append(job.key), width=2, isolated=True, start=start
    )
    queue.run(lambda: jobs)
    assert done == ["a", "b", "speed-1"]


def test_a_process_has_a_session_of_its_own_and_its_words_in_the_log(tmp_path: Path) -> None:
    """So a terminal's Ctrl-C does not reach it."""
    with (tmp_path / "log").open("ab") as log:
        process: Any = start_process(
            ["study", "work", "absent.json", "--out", "out", "--results", "r"], dict(os.environ), log
        )
    assert os.getsid(process.pid) == process.pid
    assert process.wait() == 2
    assert "absent.json" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("isolated", [False, True])
def test_a_job_that_another_process_works_on_is_waited_for(
    scale: Scale, data: Path, tmp_path: Path, isolated: bool
) -> None:
    """As one of a study that was killed and started again at once."""
    jobs = first_jobs(tmp_path, scale, data)
    lock = Lock(jobs[0].folder(tmp_path) / ".lock")
    assert lock.acquire()
    waiting: list[str] = []
    done: list[str] = []

    def say(text: str) -> None:
        if f"waiting for another process that trains {jobs[0].title}" in text:
            waiting.append(text)
            lock.release()

    queue = Queue(
        tmp_path,
        tmp_path / "results",
        say,
        lambda job: done.append(job.key),
        isolated=isolated,
        width=2,
        start=fork_workers(),
    )
    queue.run(lambda: jobs)
    assert (queue.failures, queue.remaining) == ([], {})
    assert sorted(done) == sorted(job.key for job in jobs)
    assert len(waiting) == 1


@pytest.mark.parametrize("isolated", [False, True])
def test_waiting_for_another_process_has_an_end(scale: Scale, data: Path, tmp_path: Path, isolated: bool) -> None:
    jobs = first_jobs(tmp_path, scale, data)[:1]
    assert Lock(jobs[0].folder(tmp_path) / ".lock").acquire()
    queue = Queue(
        tmp_path,
        tmp_path / "results",
        print,
        isolated=isolated,
        until=time.monotonic() + 0.5,
        start=fork_workers(),
    )
    queue.run(lambda: jobs)
    assert (queue.failures, list(queue.remaining)) == ([], [jobs[0].key])


def start_and_be_killed(folder: Path, job: Job) -> None:
    """Start a job as `Queue` does, and die without a word once it trains."""
    described = folder / "job.json"
    write_json(described, asdict(job))
    with (folder / "log").open("ab") as log:
        start_process(
            ["study", "work", str(described), "--out", str(folder), "--results", str(folder / "results")],
            dict(os.environ),
            log,
        )
    wait_until(lambda: "step 2/" in (folder / "log").read_text())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_saves_and_ends_with_the_one_that_started_it(scale: Scale, data: Path, tmp_path: Path) -> None:
    settings = {"steps": 10**6, "save_every": 10**6, "eval_every": 10**6, "log_every": 1}
    (job, *_) = first_jobs(tmp_path, with_settings(scale, settings), data)
    parent = FORKSERVER.Process(target=start_and_be_killed, args=(tmp_path, job))
    parent.start()
    parent.join()
    run = RunFolder(job.folder(tmp_path))
    wait_until(lambda: not run.is_locked, (tmp_path / "log").read_text)
    assert "step 2/" in (tmp_path / "log").read_text()
    assert len(list(run.path.glob("checkpoints/step-*"))) == 1
