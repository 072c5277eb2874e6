"""The queue: processes that take turns, time limits, and what a signal leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from altup.studies.jobs import Job
from altup.studies.queue import Queue, start_process
from altup.studies.scale import Scale, with_settings
from tests.studies.samples import TWO, plan
from tests.studies.workers import FORKSERVER, fork_workers


def test_what_the_time_limit_stops_and_all_behind_it_is_left(scale: Scale, data: Path, tmp_path: Path) -> None:
    jobs = plan([TWO], with_settings(scale, {"steps": 50_000}), data, seeds=[0, 1]).training()
    queue = Queue(
        tmp_path, lambda text: None, lambda job: None, width=2, isolated=True, until=time.monotonic() + 1
    )
    queue.run(jobs)
    assert (len(jobs), sorted(queue.left)) == (4, sorted(job.key for job in jobs))


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

    end = time.monotonic() + 120
    while not (said("step 20/") and said("waiting for its turn")):
        assert time.monotonic() < end
        assert running.is_alive()
        time.sleep(0.1)
    assert said("step 2/") == 1
    os.killpg(running.pid, signal.SIGINT)
    running.join(60)
    assert running.exitcode == 0
    saved = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("runs/*/checkpoints/step-*"))
    assert (len(saved), saved[0]) == (2, 1)
    assert saved[1] >= 20


def test_what_waits_on_one_device_is_counted_by_the_time_limit(scale: Scale, data: Path, tmp_path: Path) -> None:
    """Each is thought to take 100 s of the 250 there are, so the third begins when others have ended sooner."""
    jobs = plan([TWO], scale, data, seeds=[0, 1]).training()[:3]
    events: list[str] = []
    queue = Queue(
        tmp_path, lambda text: events.append("begins"), lambda job: events.append("ends"), lambda job: 100,
        width=3, devices=["0"], isolated=True, until=time.monotonic() + 250, start=fork_workers(),
    )  # fmt: skip
    queue.run(jobs)
    assert events[:3] == ["begins", "begins", "ends"]
    assert (events.count("begins"), events.count("ends"), queue.left) == (3, 3, [])


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
