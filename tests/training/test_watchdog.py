"""A run that hangs says where it stands and ends, so that a scheduler can start it again."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.training.config import TrainConfig
from tests.processes import PATIENCE, server, wait_until
from tests.torchrun import fork_ranks
from tests.training import hanging
from tests.training.compare import assert_same_run
from tests.training.tiny import run

SECONDS = 3.0  # no other step of these runs may take as long, even where seven processes share a core
SETTINGS = {"watchdog": SECONDS / 60, "log_every": 1}


def hang(case: dict[str, Any], said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    hanging.main(case)


def start(tmp_path: Path, what: str, **more: Any) -> Any:
    case = {"out": str(tmp_path / "run"), "what": what, "settings": SETTINGS, **more}
    process = server.Process(target=hang, args=(case, tmp_path / "said"))
    process.start()
    return process


def test_a_disk_that_hangs_ends_the_run_and_a_restart_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "data")
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 75, said
    here = r"rank 0: step 9, batches\.py:"
    assert re.search(rf"warning: no step was finished for \d+ s, where \d+ s are usual\. {here}", said), said
    assert re.search(rf"no step was finished for \d+ s \(watchdog: 0\.05 minutes\)\. {here}", said), said
    assert "exit code 75: start it again with --resume" in said
    run(tmp_path / "run", resume=True, log_every=1)
    run(tmp_path / "whole", log_every=1)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 12)


def test_what_may_take_long_is_not_counted(tmp_path: Path) -> None:
    """Both at once, as most of the time they sleep."""
    processes = {}
    for what in ("evaluation", "compiling"):
        (tmp_path / what).mkdir()
        processes[what] = start(tmp_path / what, what, seconds=1.5 * SECONDS)
    for what, process in processes.items():
        process.join(PATIENCE)
        assert process.exitcode == 0, (tmp_path / what / "said").read_text()
        assert (tmp_path / what / "run" / "final" / "config.json").exists()


@pytest.mark.slow
def test_a_process_that_was_stopped_for_a_while_does_not_hang(tmp_path: Path) -> None:
    process = start(
        tmp_path, "nothing", settings={**SETTINGS, "steps": 4000, "eval_every": 4000, "save_every": 4000}
    )
    wait_until(lambda: "step 20/" in ((tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""))
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5 * SECONDS)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    process.join(PATIENCE)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert "no step was finished" not in said


def test_ranks_say_where_each_of_them_stands(tmp_path: Path) -> None:
    case = {"out": str(tmp_path / "run"), "what": "rank 1", "settings": SETTINGS}
    codes, said = fork_ranks([hanging.__file__, json.dumps(case)])
    assert 75 in codes, said
    assert "warning: no step was finished for" in said
    told = [line for line in said.splitlines() if "warning: no step" in line][-1]
    assert "rank 0: step 9, " in told
    assert "rank 1: step 9, engine.py:" in told
    assert "(hanging.py work)" in told


@pytest.mark.slow
def test_a_rank_that_compiles_is_waited_for(tmp_path: Path) -> None:
    settings = {**SETTINGS, "steps": 10}
    case = {"out": str(tmp_path / "run"), "what": "rank 1 compiling", "seconds": 2 * SECONDS, "settings": settings}
    codes, said = fork_ranks([hanging.__file__, json.dumps(case)])
    assert codes == [0, 0], said


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    run(tmp_path, watchdog=0, steps=2)
    assert not [thread for thread in threading.enumerate() if thread.name == "altup-watchdog"]
    with pytest.raises(UserError, match="watchdog"):
        TrainConfig(watchdog=-1)
