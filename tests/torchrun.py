"""Real processes that train together: `torchrun` on this machine, with Gloo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# A crash inside a library (SIGSEGV, SIGABRT, SIGBUS), as torchrun reports it.
CRASH = re.compile(r"exitcode\s*: -(?:11|6|7)\b")


def environment() -> dict[str, str]:
    """One thread a process; and a process that crashes says where it stood."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def torchrun(*arguments: object, out: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Two processes that run `arguments` and write to the folder `out` alone; they must succeed.

    A crash inside a library is no wrong result: what was written is removed, and all starts once more, with a
    warning that says where the process stood.
    Seen once, in CI with torch 2.13 (docs/lab-log.md, "A crash that did not come back").
    """
    for attempt in (1, 2):
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode == 0 or attempt == 2 or not CRASH.search(done.stderr):
            break
        warnings.warn(f"a process crashed and was started once more:\n{last_words(done.stderr)}", stacklevel=2)
        shutil.rmtree(out, ignore_errors=True)
    assert done.returncode == 0, last_words(done.stderr)
    return done


def last_words(stderr: str) -> str:
    """Where a crashed process stood, if one did, and the end of what all of them said."""
    crash = stderr.find("Fatal Python error")
    return (stderr[crash : crash + 4000] + "\n…\n" if crash >= 0 else "") + stderr[-3000:]
