"""Real runs that are killed with SIGKILL at random instants and resumed end with the exact weights."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from altup.core.runs import list_checkpoints
from altup.core.sealed_folders import damage
from altup.training.preemption import GPU_LOCK
from tests.processes import PATIENCE, altup, prepare_text, signal_in_pass, start, with_options
from tests.torchrun import fork_ranks, torchrun, train_together
from tests.training.compare import assert_same_bits, assert_same_run, records, weights

STEPS = 15
SMALL = [
    *("--size", "tiny", "--method", "altup", "--k", "2", "--dropout", "0.1", "--inputs-length", "32"),
    *("--set", "d_model=16", "--set", "d_ff=32", "--set", "num_heads=2", "--set", "num_layers=2"),
    *("--batch-size", "8", "--micro-batch", "4", "--deterministic", "--precision", "fp32", "--track", "none"),
    *("--eval-every", "7", "--eval-sequences", "8", "--log-every", "3", "--keep-last", "2"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def never_killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The run, and how many seconds it took from its first record on."""
    folder = tmp_path_factory.mktemp("whole")
    running = start(folder / "log", *command(data, folder / "run"))
    running.wait_for("step 3/")
    begun = time.monotonic()
    assert running.wait() == 0, running.text
    return folder / "run", time.monotonic() - begun


def command(data: Path, out: Path, steps: int = STEPS) -> list[object]:
    return ["pretrain", "--data", data, "--out", out, "--steps", steps, "--save-every", 1, "--resume", *SMALL]


def kill_and_resume(data: Path, whole: tuple[Path, float], folder: Path, kills: int, seed: int) -> int:
    """Kill `kills` times, each at a random instant of the run's life, saves and start included; then finish.

    Returns how many kills came during a save. A run that finishes before its kill is begun anew, so that
    all kills count.
    """
    draw, (reference, seconds) = random.Random(seed), whole
    out, done = folder / "run", 0
    killed_in_save = 0
    while done < kills:
        running = start(folder / "log", *command(data, out))
        if draw.random() < 0.8:
            running.wait_for("step")
        time.sleep(draw.uniform(0, seconds / 4))
        running.signal(signal.SIGKILL)
        if running.wait() == 0:
            assert_same_run(reference, out, STEPS)
            shutil.rmtree(out)
            (folder / "log").unlink()
            continue
        done += 1
        killed_in_save += any(p.name.startswith(".") for p in (out / "checkpoints").glob(".*"))
        for path in list_checkpoints(out / "checkpoints"):
            assert damage(path) is None
        (folder / "log").unlink(missing_ok=True)
    code, text = altup(folder / "log", *command(data, out))
    assert code == 0, text
    assert_same_run(reference, out, STEPS)
    return killed_in_save


def test_a_few_kills(data: Path, never_killed: tuple[Path, float], tmp_path: Path) -> None:
    kill_and_resume(data, never_killed, tmp_path, kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills(data: Path, never_killed: tuple[Path, float], tmp_path: Path, seed: int) -> None:
    during_saves = kill_and_resume(data, never_killed, tmp_path, kills=20, seed=seed)
    print(f"20 kills, {during_saves} of them during a save")
    assert during_saves


def test_sigterm_saves_and_says_how_to_go_on(data: Path, never_killed: tuple[Path, float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = functools.partial(signal_in_pass, 13, signal.SIGTERM)  # in step 7: a step has two
    running = start(tmp_path / "log", *command(data, out), before=asked)
    assert running.wait() == 75, running.text
    assert "everything is saved" in running.text
    again = f"pretrain --out {out} --resume"
    assert again in running.text
    assert not (out / "final").exists()
    code, text = altup(tmp_path / "log2", *again.split())  # the settings come from the run itself
    assert code == 0, text
    assert "resuming from" in text
    assert_same_run(never_killed[0], out, STEPS)


def test_a_crash_says_where_it_happened(data: Path, never_killed: tuple[Path, float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    crashes = functools.partial(signal_in_pass, 13, signal.SIGSEGV)
    running = start(tmp_path / "log", *command(data, out), before=crashes)
    assert running.wait() == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in running.text
    assert "training/loop.py" in running.text
    code, text = altup(tmp_path / "log2", *command(data, out))
    assert code == 0, text
    assert_same_run(never_killed[0], out, STEPS)


CRASHES = f"""
import os, signal, sys
sys.path.append({str(Path(__file__).parents[2])!r})
from altup.cli.main import main
from tests.processes import signal_in_pass

rank = sys.argv.pop(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == rank:
    signal_in_pass(19, signal.SIGSEGV)  # in step 10: a step has two
main()
"""


@pytest.fixture(scope="module")
def together(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks of which none crashed."""
    out = tmp_path_factory.mktemp("together") / "run"
    train_together("-m", "altup", *command(data, out), out=out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_what_crashed(data: Path, together: Path, tmp_path: Path, rank: int) -> None:
    """With `--max-restarts` and `--resume` a run of several processes goes on by itself, to the same weights."""
    crashed, script = tmp_path / "crashed", tmp_path / "crashes.py"
    script.write_text(CRASHES)
    done = torchrun("--max-restarts=3", script, rank, *command(data, crashed))
    assert "Segmentation fault" in done.stderr
    assert "resuming from" in done.stderr
    assert_same_run(together, crashed, STEPS)


def crash(rank: int, chosen: int) -> None:
    if rank == chosen:
        signal_in_pass(19, signal.SIGSEGV)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_which_one_crashed_go_on(data: Path, together: Path, tmp_path: Path, rank: int) -> None:
    """As torchrun has it: the other one is ended, and both are started again."""
    crashed = tmp_path / "crashed"
    arguments = ["-m", "altup", *command(data, crashed)]
    codes, text = fork_ranks(arguments, before=functools.partial(crash, chosen=rank))
    assert codes[rank] == -signal.SIGSEGV, text
    assert not (crashed / "final").exists()
    codes, text = fork_ranks(arguments)
    assert codes == [0, 0], text
    assert "resuming from" in text
    assert_same_run(together, crashed, STEPS)


def test_two_runs_in_one_folder_are_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(tmp_path / "log", *command(data, out, steps=100_000))
    running.wait_for("step 3/")
    code, text = altup(tmp_path / "log2", *command(data, out, steps=100_000))
    running.signal(signal.SIGKILL)
    running.wait()
    assert code == 2
    assert "another process is training in this folder" in text


WAITS = "waiting for its turn"


@pytest.mark.parametrize("stop", [False, True])
def test_a_run_waits_for_its_turn_and_makes_the_same_steps(
    data: Path, never_killed: tuple[Path, float], tmp_path: Path, stop: bool
) -> None:
    turn, out = tmp_path / "turns" / "0", tmp_path / "run"
    turn.parent.mkdir()
    with turn.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        running = start(tmp_path / "log", *command(data, out), environment={GPU_LOCK: str(turn)})
        running.wait_for(WAITS)
        time.sleep(0.5)
        assert running.process.is_alive()
        assert not list(list_checkpoints(out / "checkpoints"))  # it saves every step
        if stop:
            running.signal(signal.SIGTERM)
            assert running.wait() == 75, running.text
            assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-1"]
    if stop:
        running = start(tmp_path / "log", *command(data, out))
    assert running.wait() == 0, running.text
    assert_same_run(never_killed[0], out, STEPS)


def test_who_is_killed_makes_way(data: Path, never_killed: tuple[Path, float], tmp_path: Path) -> None:
    turn, out = tmp_path / "turn", tmp_path / "second"
    environment = {GPU_LOCK: str(turn)}
    first = start(tmp_path / "log", *command(data, tmp_path / "first", 100_000), environment=environment)
    first.wait_for("step 3/")
    second = start(tmp_path / "log2", *command(data, out), environment=environment)
    second.wait_for(WAITS)
    time.sleep(0.5)
    assert not list(list_checkpoints(out / "checkpoints"))
    first.signal(signal.SIGKILL)
    assert second.wait() == 0, second.text
    assert_same_run(never_killed[0], out, STEPS)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    script = (
        "import time\nfrom altup.training.preemption import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "        if stop.requested: print('asked', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == -signal.SIGTERM


def signal_in_pass_and_in_writes(checkpoints: Path) -> None:
    """SIGINT in the third pass, and from then on SIGTERM or SIGINT whenever a file or folder of a checkpoint is
    written."""
    signals = itertools.cycle((signal.SIGTERM, signal.SIGINT))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename") and str(arguments[0]).startswith(f"{checkpoints}/"):
            os.kill(os.getpid(), next(signals))

    signal_in_pass(3, signal.SIGINT)
    sys.addaudithook(watch)


def test_signals_during_the_save_are_answered_once(data: Path, tmp_path: Path) -> None:
    """From the moment that a checkpoint is begun to the end of the process."""
    out = tmp_path / "run"
    rarely = with_options(command(data, out, 100_000), "--save-every", "100000", "--eval-every", "100000")
    before = functools.partial(signal_in_pass_and_in_writes, out / "checkpoints")
    running = start(tmp_path / "log", *rarely, before=before)
    assert running.wait() == 75, running.text
    assert running.text.count("saving; please wait") == 1
    assert "everything is saved" in running.text
    assert "KeyboardInterrupt" not in running.text
    assert "Aborted" not in running.text
    (checkpoint,) = list_checkpoints(out / "checkpoints")
    assert damage(checkpoint) is None


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Eight megabytes of disk: four checkpoints, of which one is being written, and as much again."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 20_000, 100_000, 300_000, 500_000])
def test_a_full_disk_costs_at_most_one_save(
    data: Path, never_killed: tuple[Path, float], small_disk: Path, tmp_path: Path, free: int
) -> None:
    """The disk fills up during the run: a clear message, whole checkpoints; with space again it goes on."""
    out = small_disk / "run"
    running = start(tmp_path / "log", *command(data, out))
    running.wait_for("step 6/")
    space = shutil.disk_usage(small_disk).free
    with contextlib.suppress(OSError):  # the run writes too
        (small_disk / "other").write_bytes(b"x" * max(space - free, 0))
    code = running.wait()
    kept = list_checkpoints(out / "checkpoints")
    assert code == 2 or (free and code == 0), running.text
    if code:
        assert "Traceback" not in running.text
        assert "No space left" in running.text
        assert "resume" in running.text
        assert kept
    assert all(damage(path) is None for path in kept)
    (small_disk / "other").unlink()
    code, text = altup(tmp_path / "log2", *command(data, out))
    assert code == 0, text
    assert_same_bits(weights(never_killed[0]), weights(out))
    assert records(never_killed[0]) == records(out)
