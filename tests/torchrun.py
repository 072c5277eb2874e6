"""Two processes that train together here, with Gloo: started by `torchrun`, or forked, which is quick."""

from __future__ import annotations

import faulthandler
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.processes import server

if TYPE_CHECKING:
    from torch.distributed import TCPStore

COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
CRASHES = (-11, -6, -7)  # SIGSEGV, SIGABRT, SIGBUS


def environment() -> dict[str, str]:
    """One thread a process; and a process that crashes says where it stood."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def torchrun(*arguments: object, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """`torchrun arguments…`, which must succeed."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def train_together(*arguments: object, out: Path, timeout: float = 900, world: int = 2) -> None:
    """`torchrun arguments…` with forked ranks, which have PyTorch already. They write to the folder `out` alone.

    A crash inside a library is no wrong result: what was written is removed, and all starts once more, with a
    warning that says where the process stood.
    Seen once, in CI with torch 2.13 (experiments/LOG.md, "A crash that did not come back").
    """
    for attempt in (1, 2):
        codes, text = fork_ranks(arguments, timeout, world)
        if attempt == 2 or not set(codes) & set(CRASHES):
            break
        warnings.warn(f"a process crashed and was started once more:\n{last_words(text)}", stacklevel=2)
        shutil.rmtree(out, ignore_errors=True)
    assert codes == [0] * world, last_words(text)


def last_words(text: str) -> str:
    """Where a crashed process stood, if one did, and the end of what all of them said."""
    crash = text.find("Fatal Python error")
    return (text[crash : crash + 4000] + "\n…\n" if crash >= 0 else "") + text[-3000:]


def fork_ranks(
    arguments: Sequence[object], timeout: float = 900, world: int = 2, before: Callable[[int], None] | None = None
) -> tuple[list[int | None], str]:
    """Exit codes and everything that the ranks said. Where one fails, the others are ended, as torchrun does."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(world)]
        _store, ranks = start_ranks([str(a) for a in arguments], outputs, before)  # it lives as long as this name
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            if any(process.exitcode for process in ranks):
                break
            time.sleep(0.02)
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()
        return [process.exitcode for process in ranks], "\n".join(path.read_text() for path in outputs)


def start_ranks(
    arguments: list[str], outputs: Sequence[Path], before: Callable[[int], None] | None = None
) -> tuple[TCPStore, list[BaseProcess]]:
    """Fork the ranks, each of which calls `before(rank)` first. The store must live as long as they do."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[BaseProcess] = [
        server.Process(target=_rank, args=(arguments, rank, len(outputs), store.port, output, before))
        for rank, output in enumerate(outputs)
    ]
    for process in ranks:
        process.start()
    return store, ranks


def _rank(
    arguments: list[str],
    rank: int,
    world: int,
    port: int,
    output: Path,
    before: Callable[[int], None] | None = None,
) -> None:
    """One process, with the environment that torchrun would give it."""
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    if before is not None:
        before(rank)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
