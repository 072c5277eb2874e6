"""Finding tasks by name, suite or file, and adding one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from altup.data.tasks import SUITES, TASKS, Task, find_task, find_tasks, register
from altup.data.tasks.formats import plain
from altup.errors import UserError


def test_names_and_suites() -> None:
    assert find_task("cola") is find_task("glue/cola")
    assert [t.name for t in find_tasks(["super_glue", "squad", "boolq"])] == [*SUITES["super_glue"], "squad"]
    assert "glue/wnli" not in SUITES["glue"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rte", "glue/rte or super_glue/rte"),
        ("squat", "'squad'"),
        ("what", "tasks list"),
        ("no.jsonl", "no such file"),
    ],
)
def test_unknown_names_are_explained(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_task(name)


def test_no_task_at_all() -> None:
    with pytest.raises(UserError, match="--task"):
        find_tasks([])


def test_own_task_from_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").write_text('{"input": "1 + 1", "target": "2"}\n')
    assert find_task(str(tmp_path)).files == {"validation": tmp_path / "validation.jsonl"}
    assert set(find_task(str(tmp_path / "validation.jsonl")).files) == {"train", "validation"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"train\.jsonl"):
        find_task(str(tmp_path / "empty"))


def test_registered_tasks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(name="mine/sums", write=plain, metrics=("exact_text",))
    try:
        assert register(task) is find_task("sums")
        with pytest.raises(UserError, match="already"):
            register(task)
    finally:
        TASKS.pop("mine/sums")
