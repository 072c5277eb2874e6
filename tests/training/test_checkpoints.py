"""Checkpoint folders under kills, damage and full disks: real processes, real files."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from altup.core.errors import UserError
from altup.core.runs import list_checkpoints, newest_whole
from altup.core.sealed_folders import MANIFEST, atomic_folder, damage, load_json, remove_leftovers, save_json
from altup.training.checkpoints import STATE_FILE, TrainingState, prune, read_state, save_tensors
from altup.training.metrics import Meter
from altup.training.parallel import ProcessGroup
from altup.training.tensor_files import TensorFiles
from tests.processes import PATIENCE


def writer(content: str):
    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(content.encode() * 1000)
        (folder / "state").mkdir()
        (folder / "state" / "rng.json").write_text(json.dumps(content))

    return write


def publish_steps(folder: Path, *numbers: int) -> None:
    for number in numbers:
        atomic_folder(folder, f"step-{number}", writer(str(number)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What a training process does: clean up, go on from the newest, save, prune, now and then replace.
TRAINER = """
import sys
from pathlib import Path
from altup.core.runs import newest_whole, step_of
from altup.core.sealed_folders import atomic_folder, remove_leftovers
from altup.training.checkpoints import prune

folder = Path(sys.argv[1])
remove_leftovers(folder)
newest = newest_whole(folder)
step = step_of(newest) if newest else 0
while True:
    step += 1
    def write(tmp):
        for i in range(4):
            (tmp / f"part-{i}").write_bytes(str(step).encode() * 20_000)
    atomic_folder(folder, f"step-{step}", write)
    if step % 3 == 0:
        atomic_folder(folder, f"step-{step}", write)
    prune(folder, 2, keep=["step-2"])
    print(step, flush=True)
"""


def kill_at_random(folder: Path, kills: int) -> None:
    chance = random.Random(0)
    reported = 0
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", TRAINER, folder], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        assert process.wait() == -signal.SIGKILL
        reported = int((first + rest).split()[-1])

        assert [damage(path) for path in list_checkpoints(folder)] == [None] * len(list_checkpoints(folder))
        remove_leftovers(folder)
        newest = newest_whole(folder)
        assert newest is not None
        number = int(newest.name.removeprefix("step-"))
        assert number in (reported, reported + 1)  # the one reported is safe; the next may have just made it
        for i in range(4):
            assert (newest / f"part-{i}").read_text() == str(number) * 20_000
        assert not [name for name in names(folder) if name.startswith(".")]
        assert "step-2" in names(folder) or number < 2
    assert reported >= kills  # no life has lost what those before it did


def test_kills_at_random_instants(tmp_path):
    kill_at_random(tmp_path / "checkpoints", kills=20)


@pytest.mark.slow
def test_many_kills_at_random_instants(tmp_path):
    kill_at_random(tmp_path / "checkpoints", kills=150)


# Forks children that kill themselves at the n-th file operation of "replace step-2, publish step-3, prune",
# for every n, and prints what is there afterwards.
SWEEP = """
import json, os, signal, sys
from pathlib import Path
from altup.core.runs import list_checkpoints, newest_whole
from altup.core.sealed_folders import atomic_folder, damage, remove_leftovers
from altup.training.checkpoints import prune

def writer(text):
    def write(tmp):
        (tmp / "sub").mkdir()
        for i in range(3):
            (tmp / "sub" / f"part-{i}").write_text(text)
    return write

def life(folder, deadline):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event == "open" or event.startswith(("os.", "shutil.")):
            seen += 1
            if seen == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    atomic_folder(folder, "step-2", writer("new 2"))
    atomic_folder(folder, "step-3", writer("3"))
    prune(folder, 1)

n, ended = 0, False
while not ended:
    n += 1
    folder = Path(sys.argv[1]) / str(n)
    for number in (1, 2):
        atomic_folder(folder, f"step-{number}", writer(f"old {number}"))
    child = os.fork()
    if child == 0:
        life(folder, n)
        os._exit(0)
    ended = os.waitpid(child, 0)[1] == 0
    before = {path.name: damage(path) for path in list_checkpoints(folder)}
    remove_leftovers(folder)
    after = {path.name: damage(path) for path in list_checkpoints(folder)}
    newest = newest_whole(folder)
    texts = [file.read_text() for file in sorted(newest.glob("sub/*"))]
    print(json.dumps([before, after, newest.name, texts, sorted(p.name for p in folder.iterdir())]))
"""


def test_a_kill_at_every_file_operation(tmp_path):
    output = subprocess.run(
        [sys.executable, "-c", SWEEP, tmp_path], check=True, capture_output=True, text=True, timeout=PATIENCE
    ).stdout
    lives = [json.loads(line) for line in output.splitlines()]
    assert len(lives) > 60
    seen = set()
    for before, after, newest, texts, left in lives:
        assert set(before.values()) | set(after.values()) == {None}, "a half checkpoint bears a name"
        assert left == sorted(after), "something was left behind"
        assert newest in ("step-2", "step-3")
        assert texts in (["old 2"] * 3, ["new 2"] * 3, ["3"] * 3)
        seen.add(texts[0])
    assert seen == {"old 2", "new 2", "3"}
    assert set(lives[-1][1]) == {"step-3"}


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty_the_list(file: Path) -> None:
    file.write_text("{}")


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("weights.bin", flip_a_byte, "the contents of weights.bin have changed"),
        ("weights.bin", truncate, "weights.bin has 1000 bytes instead of 2000"),
        ("weights.bin", Path.unlink, "weights.bin cannot be read"),
        ("state/rng.json", flip_a_byte, "the contents of rng.json have changed"),
        (MANIFEST, flip_a_byte, ""),
        (MANIFEST, truncate, f"{MANIFEST} is damaged"),
        (MANIFEST, Path.unlink, f"{MANIFEST} cannot be read"),
        (MANIFEST, empty_the_list, f"{MANIFEST} names no file"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path, caplog, file, harm, message):
    publish_steps(tmp_path, 8, 9, 10)  # 10 sorts before 8 by name
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.name == "step-10"
    assert not caplog.records
    harm(newest / file)
    with caplog.at_level(logging.WARNING):
        newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.name == "step-9"
    assert "step-10" in caplog.text
    assert message in caplog.text


def test_every_flipped_bit_of_a_manifest_is_found_or_harmless(tmp_path):
    publish_steps(tmp_path, 1)
    manifest = tmp_path / "step-1" / MANIFEST
    content = manifest.read_bytes()
    listed = json.loads(content)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        manifest.write_bytes(changed)
        assert damage(tmp_path / "step-1") or json.loads(changed) == listed


def test_no_whole_checkpoint(tmp_path, caplog):
    assert newest_whole(tmp_path / "never made") is None
    publish_steps(tmp_path, 1)
    flip_a_byte(tmp_path / "step-1" / "weights.bin")
    assert newest_whole(tmp_path) is None
    assert "step-1" in caplog.text


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    publish_steps(tmp_path, *range(1, 13))
    assert prune(tmp_path, keep_last=3, keep=["step-4"]) == [f"step-{n}" for n in (1, 2, 3, 5, 6, 7, 8, 9)]
    assert names(tmp_path) == ["step-10", "step-11", "step-12", "step-4"]
    assert prune(tmp_path, keep_last=3, keep=["step-4"]) == []
    with pytest.raises(UserError, match="keep_last=0"):
        prune(tmp_path, keep_last=0)


def test_pruning_never_removes_the_newest_whole_one(tmp_path):
    publish_steps(tmp_path, 1, 2, 3, 4, 5)
    for number in (4, 5):
        flip_a_byte(tmp_path / f"step-{number}" / "weights.bin")
    assert prune(tmp_path, keep_last=2) == ["step-1", "step-2"]
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert newest.name == "step-3"


def test_other_folders_are_left_alone(tmp_path):
    publish_steps(tmp_path, 1, 2)
    atomic_folder(tmp_path, "final", writer("final"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-3.txt").write_text("not a checkpoint")
    prune(tmp_path, keep_last=1)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["final", "notes", "step-2", "step-3.txt"]
    assert damage(tmp_path / "final") is None


def test_a_failing_writer_leaves_everything_as_it_was(tmp_path):
    publish_steps(tmp_path, 1, 2)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("a bug")

    for name in ("step-2", "step-3"):
        with pytest.raises(RuntimeError, match="a bug"):
            atomic_folder(tmp_path, name, fail)
    assert names(tmp_path) == ["step-1", "step-2"]
    newest = newest_whole(tmp_path)
    assert newest is not None
    assert (newest / "state" / "rng.json").read_text() == '"2"'


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError, match=r"could not save .*step-1"):
        publish_steps(tmp_path / "checkpoints", 1)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_whole(small_disk):
    folder = small_disk / "checkpoints"

    def save(number: int, size: int) -> None:
        tensors = {f"t{i}": torch.full((size,), number, dtype=torch.float32) for i in range(4)}
        atomic_folder(folder, f"step-{number}", lambda tmp: save_tensors(tmp / "state.safetensors", tensors))

    save(1, 100_000)
    for number, size in ((2, 200_000), (3, 10_000_000)):
        with pytest.raises(UserError, match=rf"could not save .*step-{number}.*No space left.*free space"):
            save(number, size)
    with pytest.raises(UserError, match="No space left"):  # replacing the only one must not cost it
        save(1, 200_000)
    tokenizer = Tokenizer(WordLevel({f"word {i}": i for i in range(100_000)}, unk_token="word 0"))
    with pytest.raises(UserError, match="No space left"):
        atomic_folder(folder, "step-4", lambda tmp: tokenizer.save(str(tmp / "tokenizer.json")))
    assert names(folder) == ["step-1"]
    newest = newest_whole(folder)
    assert newest is not None
    assert TensorFiles(newest, "state")["t0"][...][0] == 1
    save(2, 100_000)
    assert names(folder) == ["step-1", "step-2"]


def test_tensors_and_json_round_trip(tmp_path):
    tensors = {
        "a/b": torch.randn(3, 4).T,
        "scalar": torch.tensor(2.5),
        "bytes": torch.get_rng_state(),
        "count": torch.tensor(2**40),
        "half": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 3),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    found = TensorFiles(tmp_path, "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name][...], tensor)
    value = {"step": 3, "loss": 0.1, "state": [3, [1, 2**31, 624], None], "text": "é"}
    save_json(tmp_path / "v.json", value)
    assert load_json(tmp_path / "v.json") == value


class Bomb:
    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self):
        return Path.touch, (self.fuse,)


def test_a_pickle_is_refused_and_never_run(tmp_path):
    fuse = tmp_path / "it ran"
    pickled = tmp_path / "pickled.safetensors"
    pickled.write_bytes(pickle.dumps(Bomb(fuse)))
    torch.save({"weight": Bomb(fuse)}, tmp_path / "zipped.safetensors")
    for bomb in (pickled, tmp_path / "zipped.safetensors"):
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            TensorFiles(tmp_path, bomb.stem)
        with pytest.raises(UserError, match="cannot be read as JSON"):
            load_json(bomb)
    assert not fuse.exists()
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        TensorFiles(tmp_path, "not there")
    pickle.loads(pickled.read_bytes())
    assert fuse.exists(), "the bomb of this test is a dud"


def test_the_training_code_knows_no_pickle():
    source = Path(__file__).parents[2] / "src" / "altup"
    for file in [*source.glob("core/*.py"), *source.rglob("training/**/*.py")]:
        text = file.read_text()
        for word in ("torch.load(", "torch.save(", "import pickle", "import dill", "import joblib"):
            assert word not in text, f"{word} in {file}"


@pytest.mark.parametrize("name", ["../../x", "/dev/zero", "a/../../b"])
def test_names_in_a_manifest_lead_nowhere_else(tmp_path, name):
    (tmp_path / MANIFEST).write_text(json.dumps({name: {"bytes": 0, "sha256": ""}}))
    assert damage(tmp_path) == f"{MANIFEST} is damaged"


STATES: list[tuple[dict[str, Any] | list[Any] | None, str]] = [
    ([], "holds no state of a run"),
    ({}, "holds no state of a run"),
    ({"step": "15"}, "step='15' must be a whole number"),
    ({"step": 7}, "is of step 7"),
    ({"meter": []}, r"meter=\[\] must be a mapping"),
    ({"evaluation_due": "yes"}, "evaluation_due='yes' must be true or false"),
]


@pytest.mark.parametrize(("change", "message"), STATES)
def test_a_state_that_is_none_is_named(tmp_path, change, message):
    """Also where its hash was made to fit."""
    state = asdict(TrainingState(step=15)) | change if change else change

    def write(folder: Path) -> None:
        save_json(folder / STATE_FILE, state)

    checkpoint = atomic_folder(tmp_path, "step-15", write)
    assert damage(checkpoint) is None
    with pytest.raises(UserError, match=message):
        read_state(checkpoint)


def test_a_meter_that_lacks_a_sum_is_named():
    with pytest.raises(UserError, match="the checkpoint's meter has no loss_sum"):
        Meter(torch.device("cpu")).restore({}, ProcessGroup(0, 1, torch.device("cpu")))
