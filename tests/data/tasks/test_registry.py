"""Finding tasks by name, suite or file, and adding one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from altup.core.errors import UserError
from altup.data.tasks import SUITES, TASKS, Task, find_task, find_tasks, register
from altup.data.tasks.registry import write_pair


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
        ("", "task '' is not known"),
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
    assert set(find_task(str(tmp_path / "validation.jsonl")).files) == {"train", "validation", "test"}
    (tmp_path / "test.jsonl").write_text('{"input": "1 + 2"}\n')
    assert find_task(str(tmp_path)).files["test"] == tmp_path / "test.jsonl"
    (tmp_path / "test.jsonl.gz").write_text("")  # older, say: the plain one is read, as in a folder of data
    assert find_task(str(tmp_path)).files["test"] == tmp_path / "test.jsonl"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"train\.jsonl"):
        find_task(str(tmp_path / "empty"))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sums.jsonl").write_text("{}\n")
    first, second = (str(tmp_path / name / "sums.jsonl") for name in ("a", "b"))
    with pytest.raises(UserError, match="two tasks are called 'sums'"):
        find_tasks([first, second])
    assert [task.name for task in find_tasks([first, "cola", "glue/cola"])] == ["sums", "glue/cola"]


def test_registered_tasks_are_known() -> None:
    task = Task(name="mine/sums", write=write_pair, metrics=("exact_text",))
    try:
        assert register(task) is find_task("sums")
        with pytest.raises(UserError, match="already"):
            register(task)
    finally:
        TASKS.pop("mine/sums")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import altup\n\n1 / 0\n", "mine.py, line 3: ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py, line 1: SyntaxError"),
        ("import nowhere_to_be_found\n", "mine.py, line 1: ModuleNotFoundError"),
    ],
)
def test_an_error_in_a_file_of_one_s_own_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=words):
        find_task(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "", "."])
def test_names_of_tasks_lead_nowhere_else(name: str) -> None:
    with pytest.raises(UserError, match="cannot be called"):
        register(Task(name=name, write=write_pair, metrics=("exact_text",)))


def test_the_folder_one_stands_in_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "sums")
    assert find_task(".").name == "sums"
