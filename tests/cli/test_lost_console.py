"""A console that is lost changes neither the work of a verb nor its exit code."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.cli.test_pretrain import SMALL
from tests.processes import PATIENCE, Running, _start, altup, prepare_text, start, wait_until, with_options
from tests.studies.samples import TEXT
from tests.training.compare import assert_same_bits, records, weights

FULL = Path("/dev/full")
ENDLESS = ["--steps", "100000", "--save-every", "100000"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose console is full from the beginning."""
    out = tmp_path_factory.mktemp("runs") / "run"
    running = _start((None, FULL, FULL), ("pretrain", "--data", data, "--out", out, *SMALL), {})
    assert running.wait() == 0
    return out


def test_a_full_disk_under_the_log_stops_no_training(trained: Path, data: Path, tmp_path: Path) -> None:
    code, text = altup(tmp_path / "log", "pretrain", "--data", data, "--out", tmp_path / "run", *SMALL)
    assert code == 0, text
    assert_same_bits(weights(trained), weights(tmp_path / "run"))
    assert [record["step"] for record in records(trained)] == [2, 3, 4, 6, 6]
    assert (trained / "README.md").exists()


def run_on_a_lost(console: str, folder: Path, *arguments: object) -> Running:
    """A command whose console is lost with its first words: a pipe without a reader, or a terminal that closes."""
    if console == "terminal":
        ours, theirs = pty.openpty()
        place = Path(os.ttyname(theirs))
    else:
        place = folder / "pipe"
        os.mkfifo(place)

    def read_a_little() -> None:
        descriptor = ours if console == "terminal" else os.open(place, os.O_RDONLY)
        os.read(descriptor, 1)
        os.close(descriptor)

    reader = threading.Thread(target=read_a_little, daemon=True)
    reader.start()
    running = _start((None, place, place), arguments, {"TERM": "xterm"})
    reader.join(PATIENCE)
    if console == "terminal":
        os.close(theirs)
    return running


@pytest.mark.parametrize("console", ["pipe", "terminal"])
def test_a_console_that_ends_stops_no_training(trained: Path, data: Path, tmp_path: Path, console: str) -> None:
    running = run_on_a_lost(console, tmp_path, "pretrain", "--data", data, "--out", tmp_path / "run", *SMALL)
    assert running.wait() == 0
    assert_same_bits(weights(trained), weights(tmp_path / "run"))


def test_a_run_that_is_stopped_still_says_75(data: Path, tmp_path: Path) -> None:
    arguments = ["--data", data, "--out", tmp_path / "run", *with_options(SMALL, *ENDLESS)]
    running = _start((None, FULL, FULL), ("pretrain", *arguments), {})
    wait_for_records(tmp_path / "run")
    running.signal(signal.SIGTERM)
    assert running.wait() == 75


def test_a_mistake_still_says_2(data: Path, tmp_path: Path) -> None:
    running = _start((None, FULL, FULL), ("pretrain", "--data", "nowhere", "--out", tmp_path / "run"), {})
    assert running.wait() == 2


def test_what_only_prints_does_not_seem_to_have_succeeded(tmp_path: Path) -> None:
    running = _start((None, FULL, tmp_path / "errors"), ("params", "--size", "tiny", "--json"), {})
    assert running.wait() == 2
    text = (tmp_path / "errors").read_text()
    assert "altup: what it writes or prints was not taken: No space left on device" in text
    assert "Traceback" not in text


def test_prepare_and_finetune_go_on_too(trained: Path, data: Path, tmp_path: Path) -> None:
    words = [data.parent / "text.txt", "--out", tmp_path / "data", "--vocab-size", "600", "--workers", "1"]
    prepared = _start((None, FULL, FULL), ("prepare", *words), {})
    lines = [json.dumps({"input": f"say {word}", "target": word}) for word in ("a", "b", "c", "d")]
    for split in ("train", "validation"):
        (tmp_path / "say").mkdir(exist_ok=True)
        (tmp_path / "say" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    settings = ["--steps", "4", "--batch-size", "4", "--eval-every", "2", "--log-every", "1", "--track", "none"]
    tuned = _start(
        (None, FULL, FULL),
        (
            "finetune",
            trained,
            "--task",
            tmp_path / "say",
            "--out",
            tmp_path / "tuned",
            *settings,
            "--precision",
            "fp32",
        ),
        {},
    )
    assert prepared.wait() == 0
    assert json.loads((tmp_path / "data" / "manifest.json").read_text())["finished"]
    assert tuned.wait() == 0
    assert (tmp_path / "tuned" / "final" / "config.json").exists()


def test_a_study_goes_on_too(data: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(TEXT)
    small = [x for name in ("steps=4", "eval_every=2", "log_every=1") for x in ("--set", name)]
    arguments = [tmp_path / "two.yaml", "--data", data, "--out", tmp_path / "out", "--no-speed", *small]
    running = _start((None, FULL, FULL), ("study", "run", *arguments, "--scale", "smoke"), {})
    assert running.wait() == 0
    assert len((tmp_path / "out" / "results" / "two.csv").read_text().splitlines()) > 2
    assert all("step 4/4" in log.read_text() for log in (tmp_path / "out" / "logs").glob("*.log"))


def wait_for_records(run: Path) -> None:
    wait_until(lambda: (run / "metrics.jsonl").exists() and records(run))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGUSR1])
def test_a_closed_terminal_and_a_scheduler_stop_and_save(
    data: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    running = start(tmp_path / "log", "pretrain", "--data", data, "--out", out, *with_options(SMALL, *ENDLESS))
    wait_for_records(out)
    running.signal(number)
    assert running.wait() == 75, running.text
    assert "everything is saved" in running.text
    (saved,) = (out / "checkpoints").iterdir()
    assert f"stopped after step {saved.name.removeprefix('step-')};" in running.text.replace(",", "")
    shutil.rmtree(out)
