"""Ctrl-C while libraries are imported ends the command, without a traceback and without being swallowed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE

IMPORTING = (
    "import sys, time\nprint('importing', file=sys.stderr, flush=True)\n"
    "try:\n    time.sleep(600)\nexcept BaseException:\n    raise ModuleNotFoundError('a part')\n"
)


def interrupt(
    command: list[object], place: Path, words: str, sent: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Send Ctrl-C (or another signal) once `words` were said: the exit code, and what was said after that."""
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            break
    process.send_signal(sent)
    return process.wait(PATIENCE), process.stderr.read()


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_while_a_library_is_imported(tmp_path: Path, module: str) -> None:
    """One that the command line itself needs, and one that a verb needs; both turn the interrupt into an error."""
    (tmp_path / f"{module}.py").write_text(IMPORTING)
    command = [sys.executable, "-m", "altup", "pretrain", "--data", tmp_path, "--out", tmp_path / "run"]
    assert interrupt(command, tmp_path, "importing") == (130, "")


def test_a_scheduler_that_stops_a_run_while_it_starts_may_start_it_again(tmp_path: Path) -> None:
    """Exit code 75, as later in a run: nothing is lost yet."""
    (tmp_path / "torch.py").write_text(IMPORTING)
    command = [sys.executable, "-m", "altup", "pretrain", "--data", tmp_path, "--out", tmp_path / "run"]
    assert interrupt(command, tmp_path, "importing", signal.SIGTERM) == (75, "")


def test_from_then_on_it_is_pythons_own(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom altup.core.interrupts import end_on_interrupt, raise_on_interrupt\n"
        "end_on_interrupt()\nraise_on_interrupt()\n"
        "try:\n    print('ready', file=sys.stderr, flush=True)\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    sys.exit(7)\n"
    )
    assert interrupt([sys.executable, "-c", script], tmp_path, "ready") == (7, "")
