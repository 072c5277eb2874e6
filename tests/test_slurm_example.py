"""examples/slurm.sh under a SLURM of two shell scripts, with two "nodes" on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import PATIENCE, prepare_text, wait_until
from tests.torchrun import environment
from tests.training.compare import assert_same_bits, records, weights

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "slurm.sh"
SRUN = """#!/bin/bash
# One task a node; what it is sent, all tasks are sent.
[[ $1 == --* ]] && shift
pids=
trap 'kill -TERM $pids' TERM
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=" $!"; done
code=0
for pid in $pids; do
    while true; do
        wait "$pid"; one=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    [ $one = 0 ] || code=$one
done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> "$SLURM_LOG"; fi
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a job: the script with `torchrun` as given, as SLURM's `restart`-th attempt at it."""
    commands = tmp_path / "bin"
    commands.mkdir()
    executable(commands / "srun", SRUN)
    executable(commands / "scontrol", SCONTROL)

    def start(torchrun: str, *arguments: object, restart: int = 0, **more: str) -> subprocess.Popen[str]:
        executable(commands / "torchrun", f"#!/bin/bash\n{torchrun}\n")
        of_the_job = {
            **{"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"},
            **{"SLURM_RESTART_COUNT": str(restart), "SLURM_LOG": str(tmp_path / "slurm")},
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), *map(str, arguments)],
            env={**environment(), **of_the_job, **more, "PATH": f"{commands}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def queued(tmp_path: Path) -> list[str]:
    """What was asked of the scheduler."""
    path = tmp_path / "slurm"
    return path.read_text().splitlines() if path.exists() else []


SAVES = "mkdir -p $OUT/checkpoints/step-5"
WAITS = "trap 'exit 1' TERM; touch $OUT/here-$SLURM_NODEID; while true; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("torchrun", "number", "code", "requeued"),
    [
        ("exit 0", None, 0, False),
        ("exit 3", None, 3, False),
        (f"{SAVES}; exit 1", None, 75, True),
        (WAITS, signal.SIGUSR1, 75, True),
        (WAITS, signal.SIGTERM, 1, False),
    ],
    ids=["finished", "mistake", "crash after a save", "time over", "cancelled"],
)
def test_what_goes_back_into_the_queue(
    cluster: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    torchrun: str,
    number: signal.Signals | None,
    code: int,
    requeued: bool,
) -> None:
    job = cluster(torchrun, "--out", tmp_path, OUT=str(tmp_path))
    if number:
        wait_until(lambda: len(list(tmp_path.glob("here-*"))) == 2)
        job.send_signal(number)
    text, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == code, text
    assert queued(tmp_path) == ([f"requeue {os.getpid()}"] if requeued else [])


def test_torchrun_is_told_of_all_nodes(cluster: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    job = cluster('echo "$SLURM_NODEID $*"', "--data", "d", f"--out={tmp_path}", SLURM_GPUS_ON_NODE="8")
    text, _ = job.communicate(timeout=PATIENCE)
    lines = sorted(text.splitlines())
    port = 20000 + os.getpid() % 20000
    assert [line[0] for line in lines] == ["0", "1"]
    assert all(
        f"--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}" in x for x in lines
    )
    assert all(line.endswith(f"-m altup pretrain --data d --out={tmp_path} --resume") for line in lines)
    job = cluster("exit 0", "--data", "d")
    assert "no --out" in job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 2


def run_until(run: Path, step: int) -> None:
    wait_until(
        lambda: (run / "metrics.jsonl").exists() and any(record["step"] >= step for record in records(run)),
        lambda: f"step {step} in {run}",
    )


@pytest.mark.slow
def test_a_job_of_several_lives_trains_what_one_would(
    cluster: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two nodes: told that the time is over, queued again, one process killed, and started again by torchrun."""
    data = prepare_text(tmp_path)
    torchrun = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
    command = [
        *("--data", data, "--size", "tiny", "--method", "altup", "--inputs-length", "32", "--set", "d_model=16"),
        *(
            "--set",
            "num_layers=2",
            "--batch-size",
            "8",
            "--steps",
            "400",
            "--log-every",
            "1",
            "--eval-every",
            "200",
        ),
        *("--eval-sequences", "8", "--save-every", "25", "--deterministic", "--parallel", "fsdp"),
    ]
    whole = cluster(torchrun, *command, "--out", tmp_path / "whole")
    assert whole.wait(400) == 0
    run = tmp_path / "run"
    first = cluster(torchrun, *command, "--out", run)
    run_until(run, 40)
    first.send_signal(signal.SIGUSR1)
    text, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 75, text[-3000:]
    assert queued(tmp_path) == [f"requeue {os.getpid()}"]
    saved = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert saved % 25 or saved == records(run)[-1]["step"]
    second = cluster(torchrun, *command, "--out", run, restart=1)
    run_until(run, saved + 30)
    victim = subprocess.run(["pgrep", "-f", f"altup pretrain.*--out {run}"], capture_output=True, text=True)
    workers = [
        int(pid) for pid in victim.stdout.split() if b"LOCAL_RANK=0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(workers[-1], signal.SIGKILL)
    text, _ = second.communicate(timeout=400)
    assert second.returncode == 0, text[-3000:]
    assert_same_bits(weights(run), weights(tmp_path / "whole"))
