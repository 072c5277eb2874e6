"""Atomic writes and locks, under kills: real processes, real files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.core.files import (
    Lock,
    atomic_write,
    check_file_name,
    check_relative_path,
    locked,
    read_json,
    rename_folder,
    sha256_of,
)

# Forks children that kill themselves at the n-th file operation of an atomic write, for every n.
SWEEP = """
import os, signal, sys
from pathlib import Path
from altup.core.files import atomic_write

n, ended = 0, False
while not ended:
    n += 1
    path = Path(sys.argv[1]) / str(n) / "file.json"
    atomic_write(path, "old" * 1000)
    if os.fork() == 0:
        seen = 0
        def hook(event, args):
            global seen
            if event == "open" or event.startswith("os."):
                seen += 1
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        atomic_write(path, "new" * 1000)
        os._exit(0)
    ended = os.wait()[1] == 0
    print(n, path.read_text() in ("old" * 1000, "new" * 1000))
"""


def test_a_kill_at_any_file_operation_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SWEEP, tmp_path], capture_output=True, text=True, check=True)
    outcomes = [line.split()[1] for line in done.stdout.splitlines()]
    assert len(outcomes) > 3
    assert set(outcomes) == {"True"}
    last = tmp_path / str(len(outcomes))
    assert [path.name for path in last.iterdir()] == ["file.json"]
    assert (last / "file.json").read_text() == "new" * 1000


@pytest.mark.parametrize("content", ["Größe\n", "Größe\n".encode(), lambda path: path.write_text("Größe\n")])
def test_text_bytes_and_functions_are_written_into_folders_that_are_made(tmp_path: Path, content) -> None:
    path = tmp_path / "a" / "b" / "file.txt"
    atomic_write(path, content)
    assert path.read_text(encoding="utf-8") == "Größe\n"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    atomic_write(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, fail)
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]


def test_what_the_system_refuses_names_the_file_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as told:
        atomic_write(tmp_path / "folder", "text")
    assert told.value.filename == str(tmp_path / "folder")
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


def test_a_folder_gets_its_name_with_all_that_is_below_it(tmp_path: Path) -> None:
    (tmp_path / "made" / "deep").mkdir(parents=True)
    (tmp_path / "made" / "deep" / "file").write_bytes(b"x")
    rename_folder(tmp_path / "made", tmp_path / "name")
    assert (tmp_path / "name" / "deep" / "file").read_bytes() == b"x"
    assert not (tmp_path / "made").exists()


def test_the_hash_is_that_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9_000
    (tmp_path / "file").write_bytes(content)
    assert sha256_of(tmp_path / "file") == hashlib.sha256(content).hexdigest()


HOLD = """
import sys, time
from pathlib import Path
from altup.core.files import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("place", ["folder", "new/file.lock"])
def test_a_lock_is_exclusive_and_ends_with_its_process(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        lock = Lock(path)
        assert not lock.acquire()
        with pytest.raises(UserError, match="somebody is at work"), locked(path, "somebody is at work"):
            pass
        looks: list[None] = []
        assert not lock.acquire(keep_waiting=lambda: looks.append(None) or len(looks) < 3)
        assert len(looks) == 3

        killer = threading.Timer(0.3, holder.kill)
        killer.start()
        assert lock.acquire(keep_waiting=lambda: True)
        assert lock.held
        assert not Lock(path).acquire()
        lock.release()
        with locked(path, "somebody is at work"):
            assert not Lock(path).acquire()
        assert Lock(path).acquire()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("name", ["varying-k", "model-00001-of-00002.safetensors", "étude_2", "-", "0abdd949773b"])
def test_names_that_stay_where_they_are(name: str) -> None:
    assert check_file_name(name, "here") == name
    assert check_relative_path(f"tokenizer/{name}", "here") == f"tokenizer/{name}"


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".git", "a/b", "/etc/passwd", "a\\b", "a b", "a\n", "~", "x" * 300]
)
def test_names_that_may_lead_elsewhere(name: str) -> None:
    with pytest.raises(UserError, match=r"here: .* cannot be a file's name"):
        check_file_name(name, "here")
    with pytest.raises(UserError):
        check_relative_path(f"tokenizer/{name.replace('a/b', 'a/../b')}", "here")


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        for read in (read_json, sha256_of):
            with pytest.raises(UserError, match="a pipe, a socket or a device"):
                read(path)


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 1_000_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep.json")


def test_a_lock_is_lost_with_its_file(tmp_path: Path) -> None:
    """Also where another file of the same name stands there by now, which another process may hold."""
    path = tmp_path / ".lock"
    with locked(path, "held") as lock:
        assert not lock.lost
        path.rename(tmp_path / "moved")
        assert lock.lost
        path.touch()
        assert lock.lost
        (tmp_path / "moved").replace(path)
        assert not lock.lost
    assert lock.lost
