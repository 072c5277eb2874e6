"""New folders that are sealed: what a kill, a full disk, a second process or damage leave of them."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.core.sealed_folders import MANIFEST, damage, new_sealed_folder, read_sealed_json, write_sealed_json


def write(target: Path, error: OSError | None = None) -> None:
    with new_sealed_folder(target) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "weights").mkdir()
        for part in range(3):
            (folder / "weights" / f"part-{part}").write_bytes(b"x" * 1000)
        if error:
            raise error


@pytest.mark.parametrize("exists", [False, True])
def test_a_kill_at_every_file_operation(tmp_path: Path, exists: bool) -> None:
    """The folder is whole, or not there, or as empty as it was; and the same command makes it."""
    states, ended, number = set(), False, 0
    while not ended:
        number += 1
        target = tmp_path / str(number) / "wide"
        (target if exists else target.parent).mkdir(parents=True)
        child = os.fork()
        if child == 0:
            _die_at(number)
            write(target)
            os._exit(0)
        ended = os.waitpid(child, 0)[1] == 0
        state = "missing" if not target.exists() else "whole" if damage(target) is None else "empty"
        assert state != "empty" or not any(target.iterdir())
        states.add(state)
        if state != "whole":
            write(target)
        assert damage(target) is None
        assert [path.name for path in target.parent.iterdir()] == ["wide"]
    assert number > 20
    assert states == ({"empty", "whole"} if exists else {"missing", "empty", "whole"})


def _die_at(deadline: int) -> None:
    seen = 0

    def hook(event: str, args: object) -> None:
        nonlocal seen
        if event == "open" or event.startswith(("os.", "shutil.")):
            seen += 1
            if seen == deadline:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not save .*wide.*No space left.*free space"):
        write(tmp_path / "wide", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "wide")
    assert damage(tmp_path / "wide") is None


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with new_sealed_folder(tmp_path / "wide") as folder:
        (folder / "config.json").write_text("mine")
        with pytest.raises(UserError, match="another process writes there"):
            write(tmp_path / "wide")
        (folder / "more.json").write_text("mine")
    assert damage(tmp_path / "wide") is None
    assert (tmp_path / "wide/config.json").read_text() == "mine"
    with pytest.raises(UserError, match="is not empty"):
        write(tmp_path / "wide")


def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the folder that you are in"):
        write(Path())
    write(Path("here"))
    assert damage(tmp_path / "here") is None


def test_damage_is_found(tmp_path: Path) -> None:
    write(tmp_path / "wide")
    part = tmp_path / "wide/weights/part-1"
    part.write_bytes(b"x" * 999 + b"y")
    assert damage(tmp_path / "wide") == "the contents of part-1 have changed"
    (tmp_path / "wide" / MANIFEST).write_text("[]")
    assert damage(tmp_path / "wide") == f"{MANIFEST} is damaged"


def test_a_json_file_that_holds_its_own_hash(tmp_path: Path) -> None:
    content = {"b": [1.5, None], 12: {"x": "é"}, 9: float("nan")}
    write_sealed_json(tmp_path / "sealed.json", content)
    assert read_sealed_json(tmp_path / "sealed.json").keys() == {"b", "12", "9"}
    text = (tmp_path / "sealed.json").read_text()
    for changed in (text.replace("1.5", "1.25"), text.replace('"9"', '"8"'), "{}"):
        (tmp_path / "sealed.json").write_text(changed)
        with pytest.raises(ValueError, match="changed after it was written"):
            read_sealed_json(tmp_path / "sealed.json")
