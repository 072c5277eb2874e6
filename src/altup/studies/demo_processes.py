"""The demo's runs, a process for each seed: models as small as these make no use of a second thread."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.studies.demo import MODELS, Demo
from altup.studies.queue import Process, signals_as_interrupt, start_process
from altup.training.metrics import read_records
from altup.training.preemption import STOPPED

PAUSE = 0.5  # seconds between two looks at the runs
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
Watch = Callable[[str, int, dict[str, Any]], None]  # method, seed and a record of the run


def train_seeds(demo: Demo, seeds: list[int], watch: Watch) -> bool:
    """Train all models of the seeds; `watch` is told every record. False if a signal asked to stop.

    Ctrl-C and SIGTERM are for this process: it asks the others to save and stop, and waits for them.
    """
    told = {(method, seed): len(_records(demo, method, seed)) for method in MODELS for seed in seeds}
    running: dict[int, Process] = {}
    with signals_as_interrupt():
        try:
            for seed in seeds:
                running[seed] = _start(demo, seed)
            while True:
                ended = all(process.poll() is not None for process in running.values())
                for (method, seed), before in told.items():
                    new = _records(demo, method, seed)[before:]
                    told[method, seed] += len(new)
                    for record in new:
                        watch(method, seed, record)
                failed = [seed for seed, process in running.items() if process.poll() not in (None, 0, STOPPED)]
                if failed:
                    raise UserError(_reason(demo, failed[0], running[failed[0]]))
                if ended:
                    return all(process.returncode == 0 for process in running.values())
                time.sleep(PAUSE)
        except KeyboardInterrupt:
            return False
        finally:
            _stop(list(running.values()))


def _start(demo: Demo, seed: int) -> Process:
    log = _log(demo, seed)
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["demo", "--out", demo.out, "--steps", demo.steps, "--seed", seed, "--seeds", 1]
    with log.open("ab") as file:
        return start_process([str(argument) for argument in arguments], {**os.environ, **ONE_THREAD}, file)


def _stop(processes: list[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait()


def _log(demo: Demo, seed: int) -> Path:
    return demo.out / "logs" / f"{demo.steps}-steps-seed-{seed}.log"


def _records(demo: Demo, method: str, seed: int) -> list[dict[str, Any]]:
    return read_records(demo.folder(method, seed) / "metrics.jsonl")


def _reason(demo: Demo, seed: int, process: Process) -> str:
    lines = _log(demo, seed).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("altup: ") if lines else f"exit code {process.returncode}"
    return f"the runs of seed {seed} ended: {last} (log: {_log(demo, seed)})"
