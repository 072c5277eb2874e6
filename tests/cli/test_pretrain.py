"""`altup pretrain` and `altup generate` as a user meets them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from altup.core.sealed_folders import damage
from tests.processes import PATIENCE, altup, prepare_text, run, wait_until, with_options
from tests.torchrun import COMMAND, environment, torchrun
from tests.training.compare import assert_same_bits, assert_same_run, records, weights

SMALL = [
    *("--size", "tiny", "--method", "altup", "--inputs-length", "32", "--set", "d_model=16", "--set", "d_ff=32"),
    *("--set", "num_layers=2", "--batch-size", "8", "--steps", "6", "--log-every", "2", "--eval-every", "3"),
    *("--eval-sequences", "8", "--deterministic"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    code, text = altup(folder / "log", "pretrain", "--data", data, "--out", folder / "run", *SMALL)
    assert code == 0, text
    assert "finished 6 steps" in text
    return folder / "run"


def config_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_a_run_is_a_folder(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "final", "README.md", "tensorboard"} <= names
    assert [(r["step"], r["split"]) for r in records(trained)] == [
        *((2, "train"), (3, "validation"), (4, "train"), (6, "train"), (6, "validation"))
    ]
    lines = (trained / "metrics.jsonl").read_text().splitlines()
    assert all({"step", "split", "loss", "accuracy"} <= json.loads(line).keys() for line in lines)
    assert all("seq_per_s" in json.loads(line) for line in lines if '"train"' in line)


def test_the_card_tells_what_is_there(trained: Path) -> None:
    card = (trained / "README.md").read_text()
    last = records(trained)[-1]
    assert f"| last | 6 | {last['loss']:.4f} | {last['accuracy']:.2%} |" in card
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "curves.png" in card
    assert (trained / "config.yaml").read_text() in card
    code = card.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code + "print(len(tokenizer), model.config.d_model)"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "16"


def test_tensorboard_holds_the_same_numbers(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    shown = {event.step: event.value for event in events.Scalars("validation/loss")}
    assert shown == pytest.approx({r["step"]: r["loss"] for r in records(trained) if r["split"] == "validation"})


def test_a_saved_config_repeats_the_run(trained: Path, data: Path, tmp_path: Path) -> None:
    code, text = altup(
        tmp_path / "log", "pretrain", "--config", trained / "config.yaml", "--out", tmp_path / "run"
    )
    assert code == 0, text
    assert config_of(tmp_path / "run") == config_of(trained)
    assert_same_run(trained, tmp_path / "run", 6)


def test_flags_win_over_the_file(trained: Path, tmp_path: Path) -> None:
    arguments = ["--config", trained / "config.yaml", "--method", "dense", "--steps", 2, "--set", "d_ff=48"]
    code, text = altup(tmp_path / "log", "pretrain", *arguments, "--out", tmp_path / "run", "--track", "none")
    assert code == 0, text
    config = config_of(tmp_path / "run")
    assert (config["method"], config["k"], config["steps"], config["batch_size"]) == ("dense", None, 2, 8)
    assert config["model_overrides"] == {"d_model": 16, "d_ff": 48, "num_layers": 2}
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_resuming_a_finished_run_says_so(trained: Path, tmp_path: Path) -> None:
    before = weights(trained)
    code, text = altup(tmp_path / "log", "pretrain", "--out", trained, "--resume")
    assert code == 0
    assert "finished 6 steps" in text
    assert_same_bits(before, weights(trained))


def test_the_end_says_how_many_steps_were_skipped(data: Path, tmp_path: Path) -> None:
    """Weights that one step with this rate has made infinite give no gradient again."""
    arguments = ["--optimizer", "adamw", "--lr", "1e30", "--schedule", "constant", "--decay-fraction", "0"]
    code, text = altup(tmp_path / "log", "pretrain", "--data", data, "--out", tmp_path / "run", *SMALL, *arguments)
    assert code == 0, text
    skipped = [record["skipped"] for record in records(tmp_path / "run") if record["split"] == "train"][-1]
    assert skipped > 0
    assert f"finished 6 steps ({skipped} skipped: gradients that are not finite); the model is in" in text
    again = altup(tmp_path / "log2", "pretrain", "--out", tmp_path / "run", "--resume")
    assert f"({skipped} skipped" in again[1]


def test_one_step_is_one_step(data: Path, tmp_path: Path) -> None:
    arguments = with_options(SMALL, "--steps", "1", "--batch-size", "1")
    code, text = altup(tmp_path / "log", "pretrain", "--data", data, "--out", tmp_path / "run", *arguments)
    assert code == 0, text
    assert "finished 1 step;" in text
    assert "1 step of 1 sequence," in text
    assert "warning" not in text
    assert "for 1 step at batch 1" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "7", "--resume"], "seed: 0 there, 7 now"),
        (["--steps", "5", "--resume"], "--steps 5 is less than the 6"),
        (["--lr", "0.5", "--method", "recycled", "--resume"], "method: 'altup' there, 'recycled' now"),
        ([], "already holds this run; add --resume"),
        (["--size", "gigantic"], "--size gigantic is not known; choose one of 'tiny'"),
        (["--set", "d_ff"], "expected NAME=VALUE"),
        (["--set", "wings=2"], "--set wings is not known"),
        (
            ["--track", "abacus"],
            "--track abacus is not known; choose one of 'tensorboard', 'wandb', 'trackio', 'none'",
        ),
        (
            ["--model", "decoder", "--inputs-length", "100000"],
            "hold out a larger part (--validation-fraction), or give a smaller --inputs-length",
        ),
        (["--data", "nowhere"], "nowhere holds no prepared data; make it with `altup prepare"),
    ],
)
def test_mistakes_get_one_clear_line(
    trained: Path, data: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    fresh = with_options(["--out", trained, "--data", data, *SMALL], *arguments)
    code, text = altup(tmp_path / "log", "pretrain", *fresh)
    assert code == 2
    assert text.startswith("altup: ")  # nothing is announced before it may begin
    assert message in text
    assert "Traceback" not in text


def test_only_fields_of_a_model_are_offered(data: Path, tmp_path: Path) -> None:
    code, text = altup(tmp_path / "log", "pretrain", "--data", data, "--out", tmp_path / "run", "--set", "nope=3")
    assert code == 2
    offered = text.split("choose one of ")[1]
    assert all(f"'{name}'" in offered for name in ("d_ff", "num_layers", "num_blocks", "tie_word_embeddings"))
    for name in ("id2label", "problem_type", "return_dict", "transformers_version", "pad_token_id"):
        assert name not in offered


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may be written; of root only a disk can ask that."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid():
        folder.chmod(0o555)
        yield folder
        return
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_may_not_be_written_is_told_as_that(data: Path, read_only: Path, tmp_path: Path) -> None:
    verbs = {"pretrain": ["--data", data, *SMALL], "prepare": [data.parent / "text.txt", "--workers", "1"]}
    for verb, arguments in verbs.items():
        code, text = altup(tmp_path / verb, verb, *arguments, "--out", read_only / "new")
        assert code == 2, text
        assert "give a folder that you may write to (--out)" in text
        assert "free space" not in text


def test_a_tracker_that_is_not_installed(data: Path, tmp_path: Path) -> None:
    if find_spec("wandb"):
        pytest.skip("wandb is installed here")
    arguments = ["--data", data, "--out", tmp_path / "run", *SMALL, "--track", "wandb"]
    code, text = altup(tmp_path / "log", "pretrain", *arguments)
    assert code == 2
    assert "--track wandb needs the package 'wandb': pip install wandb" in text
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_an_unknown_key_in_the_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batchsize: 8\n")
    code, text = altup(
        tmp_path / "log", "pretrain", "--config", tmp_path / "run.yaml", "--data", data, "--out", tmp_path / "run"
    )
    assert code == 2
    assert "run.yaml: unknown key 'batchsize'; did you mean 'batch_size'?" in text
    assert not (tmp_path / "run").exists()


def test_other_data_is_noticed(trained: Path, data: Path, tmp_path: Path) -> None:
    """A run goes on with the same data in another place, and not with other data in the same place."""
    run = shutil.copytree(trained, tmp_path / "run")
    moved = shutil.copytree(data, tmp_path / "moved")
    code, text = altup(tmp_path / "log", "pretrain", "--out", run, "--data", moved, "--resume")
    assert code == 0, text
    other = tmp_path / "other"
    other.mkdir()
    code, text = altup(
        tmp_path / "log2", "pretrain", "--out", run, "--data", prepare_text(other, 3000), "--resume"
    )
    assert code == 2
    assert "batches" in text


def test_a_damaged_shard_is_found_before_training(data: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(data, tmp_path / "bad")
    shard = next(bad.glob("train-*.bin"))
    content = bytearray(shard.read_bytes())
    content[1000] ^= 4
    shard.write_bytes(content)
    for more in ([], ["--resume"]):
        code, text = altup(tmp_path / "log", "pretrain", "--data", bad, "--out", tmp_path / "run", *SMALL, *more)
        assert code == 2
        assert shard.name in text
        assert not (tmp_path / "run").exists()


def test_generate_fills_in(trained: Path, tmp_path: Path) -> None:
    prompts = ["--prompt", "a <extra_id_0> b <extra_id_1>.", "--prompt", "dun mor"]
    code, text = altup(tmp_path / "log", "generate", trained, *prompts, "--max-new-tokens", 8)
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0] == "'dun mor' has no gap, so the model writes at its end; mark a gap with <extra_id_0>"
    filled, continued = lines[-2:]
    assert filled.startswith("a ")
    assert filled.endswith(".")
    assert continued.startswith("dun mor")
    assert "extra_id" not in filled + continued
    for folder in (trained / "final", trained / "checkpoints" / "step-6"):
        again = altup(tmp_path / f"log-{folder.name}", "generate", folder, *prompts, "--max-new-tokens", 8)
        assert again == (code, text)


def test_generate_reads_lines(trained: Path) -> None:
    lines = "one <extra_id_0> two\n\nthree\n"
    done = run("generate", trained, "--max-new-tokens", "4", "--temperature", "1", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("one ")
    assert first.endswith(" two")
    assert second.startswith("three")


def test_generate_from_nothing(tmp_path: Path) -> None:
    code, text = altup(tmp_path / "log", "generate", tmp_path, "--prompt", "a")
    assert code == 2
    assert "neither a model folder" in text


@pytest.mark.slow
def test_torchrun_trains_together(trained: Path, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = torchrun("-m", "altup", "pretrain", "--data", data, "--out", run, *SMALL, "--parallel", "fsdp")
    assert done.stdout.count("finished 6 steps") == 1
    for ours, theirs in zip(records(trained), records(run), strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_signal_to_torchrun_stops_and_saves(data: Path, tmp_path: Path) -> None:
    run, endless = tmp_path / "run", ["--steps", "100000", "--log-every", "1", "--save-every", "100000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "-m", "altup", "pretrain", "--data", data, "--out", run, *with_options(SMALL, *endless)],
            env=environment(),
            stdout=log,
            stderr=log,
        )
        wait_until(lambda: (run / "metrics.jsonl").exists() and records(run))
        process.terminate()
        process.wait(PATIENCE)
    text = (tmp_path / "log").read_text()
    (saved,) = (run / "checkpoints").iterdir()
    assert damage(saved) is None
    assert f"stopped after step {saved.name.removeprefix('step-')}; everything is saved" in text.replace(",", "")
