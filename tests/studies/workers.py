"""Workers of a queue forked from a process that has already imported what is slow."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from tests import processes

FORKSERVER = multiprocessing.get_context("forkserver")  # with what `processes` has it import


class Forked:
    """A process of `multiprocessing` in the clothes of `subprocess`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(processes.PATIENCE)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def fork_workers(context: Any = FORKSERVER) -> Callable[[list[str], dict[str, str], IO[bytes]], Forked]:
    """What a queue starts its processes with."""

    def start(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> Forked:
        process = context.Process(target=_work, args=(arguments, Path(log.name), environment))
        process.start()
        return Forked(process)

    return start


def _work(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()  # as `start_process` does
    processes._altup(arguments, (None, log, log), environment)
