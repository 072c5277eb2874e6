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
from tests.studies.samples import TWO, plan
from tests.studies.workers import FORKSERVER, fork_workers


def test_what_the_time_limit_stops_and_all_behind_it_is_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    jobs = plan([TWO], with_settings(scale, {"steps": 50_000}), data, seeds=[0, 1]).training()
    queue = Queue(
        tmp_path, lambda text: None, lambda job: None, width=2, isolated=True, until=time.monotonic() + 1,
        start=fork_workers(),
    )  # fmt: skip
    queue.run(jobs)
    assert (len(jobs), sorted(queue.left)) == (4, sorted(job.key for job in jobs))


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

    jobs = plan([TWO], scale, data).training()
    queue = Queue(tmp_path, print, print, width=width, devices=devices, isolated=True, at_once=True, start=start)
    queue.run(jobs)
    assert set(seen) == {threads}
    seen.clear()
    queue.run(jobs, alone=True)  # as speeds are measured
    assert set(seen) == {given}


def run_in_own_group(jobs: list[Job], out: Path) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = fork_workers(multiprocessing.get_context("fork"))
    queue = Queue(out, print, print, width=2, devices=["0"], isolated=True, start=workers)
    queue.run(jobs)
    assert sorted(queue.left) == sorted(job.key for job in jobs)


def test_jobs_of_one_device_take_turns_and_ctrl_c_loses_nothing(scale: Scale, data: Path, tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to every process of its group."""
    settings = {"steps": 50_000, "save_every": 50_000, "eval_every": 50_000, "log_every": 1}
    jobs = plan([TWO], with_settings(scale, settings), data).training()
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
    jobs = plan([TWO], scale, data).training()
    queue = Queue(
        tmp_path, lambda text: None, lambda job: None, width=2, devices=["0"], isolated=True, at_once=True,
        start=fork_workers(),
    )  # fmt: skip
    (tmp_path / "turns").mkdir()
    turn = Lock(tmp_path / "turns" / "0")
    assert turn.acquire()
    queue.run(jobs)
    turn.release()
    assert (len(jobs), queue.left, queue.failed) == (2, [], [])


@pytest.mark.parametrize("at_once", [False, True])
def test_what_waits_on_one_device_is_counted_by_the_time_limit(
    scale: Scale, data: Path, tmp_path: Path, at_once: bool
) -> None:
    """Each is thought to take 1000 s of the 2500 there are, so the third begins when others have ended sooner."""
    jobs = plan([TWO], scale, data, seeds=[0, 1]).training()[:3]
    events: list[str] = []
    queue = Queue(
        tmp_path, lambda text: events.append("begins"), lambda job: events.append("ends"), lambda job: 1000,
        width=3, devices=["0"], isolated=True, at_once=at_once, until=time.monotonic() + 2500,
        start=fork_workers(),
    )  # fmt: skip
    queue.run(jobs)
    assert events[:3] == ["begins", "begins", "ends"]
    assert (events.count("begins"), events.count("ends"), queue.left) == (3, 3, [])


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
    queue = Queue(tmp_path, lambda text: None, lambda job: None, width=2, isolated=True, start=start)
    queue.run([slow, fast], more=lambda: [slow, *([second] if "fast-1" in queue.ended else [fast])])
    assert sorted(queue.ended) == ["fast-1", "fast-2", "slow-1"]


def test_what_needs_a_failed_model_is_left_out(tmp_path: Path) -> None:
    queue = Queue(tmp_path, lambda text: None, lambda job: None)
    queue.failed.append("a")
    queue.run([Job("finetune", "b", "b", {}, needs=("a",))])
    assert queue.failed == ["a", "b"]


def test_a_process_has_a_session_of_its_own_and_its_words_in_the_log(tmp_path: Path) -> None:
    """So a terminal's Ctrl-C does not reach it."""
    with (tmp_path / "log").open("ab") as log:
        process: Any = start_process(["study", "work", "absent.json", "--out", "out"], dict(os.environ), log)
    assert os.getsid(process.pid) == process.pid
    assert process.wait() == 2
    assert "absent.json" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("isolated", [False, True])
def test_a_job_that_another_process_works_on_is_waited_for(
    scale: Scale, data: Path, tmp_path: Path, isolated: bool
) -> None:
    """As one of a study that was killed and started again at once."""
    jobs = plan([TWO], scale, data).training()
    lock = Lock(jobs[0].folder(tmp_path) / ".lock")
    assert lock.acquire()
    waiting: list[str] = []
    done: list[str] = []

    def say(text: str) -> None:
        if f"waiting for another process that trains {jobs[0].title}" in text:
            waiting.append(text)
            lock.release()

    queue = Queue(
        tmp_path, say, lambda job: done.append(job.key), isolated=isolated, width=2, start=fork_workers()
    )
    queue.run(jobs)
    assert (queue.failed, queue.left) == ([], [])
    assert sorted(done) == sorted(job.key for job in jobs)
    assert len(waiting) == 1


@pytest.mark.parametrize("isolated", [False, True])
def test_waiting_for_another_process_has_an_end(scale: Scale, data: Path, tmp_path: Path, isolated: bool) -> None:
    jobs = plan([TWO], scale, data).training()[:1]
    assert Lock(jobs[0].folder(tmp_path) / ".lock").acquire()
    queue = Queue(tmp_path, print, print, isolated=isolated, until=time.monotonic() + 0.5, start=fork_workers())
    queue.run(jobs)
    assert (queue.failed, queue.left) == ([], [jobs[0].key])


def start_and_be_killed(folder: Path, job: Job) -> None:
    """Start a job as `Queue` does, and die without a word once it trains."""
    described = folder / "job.json"
    write_json(described, asdict(job))
    with (folder / "log").open("ab") as log:
        start_process(["study", "work", str(described), "--out", str(folder)], dict(os.environ), log)
    wait_until(lambda: "step 2/" in (folder / "log").read_text())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_saves_and_ends_with_the_one_that_started_it(scale: Scale, data: Path, tmp_path: Path) -> None:
    settings = {"steps": 10**6, "save_every": 10**6, "eval_every": 10**6, "log_every": 1}
    (job, *_) = plan([TWO], with_settings(scale, settings), data).training()
    parent = FORKSERVER.Process(target=start_and_be_killed, args=(tmp_path, job))
    parent.start()
    parent.join()
    run = RunFolder(job.folder(tmp_path))
    wait_until(lambda: not run.is_locked, (tmp_path / "log").read_text)
    assert "step 2/" in (tmp_path / "log").read_text()
    assert len(list(run.path.glob("checkpoints/step-*"))) == 1
