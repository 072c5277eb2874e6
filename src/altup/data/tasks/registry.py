"""The tasks by name, the suites they form, and a user's own."""

from __future__ import annotations

import re
import runpy
import traceback
from collections.abc import Iterable
from pathlib import Path

from altup.core.errors import UserError, check_choice, did_you_mean
from altup.data.tasks.published import GLUE, QUESTION_ANSWERING, SUPER_GLUE
from altup.data.tasks.task import JSON_LINES, Example, Record, Task, text_of

TASKS: dict[str, Task] = {}
# What counts in a suite's average; WNLI does not, as in the T5 paper.
SUITES: dict[str, tuple[str, ...]] = {
    "glue": tuple(task.name for task in GLUE if task.short_name != "wnli"),
    "super_glue": tuple(task.name for task in SUPER_GLUE),
}
TAKEN = {"step", "split", "score", "loss", "accuracy", *SUITES}  # by other fields of a run's records
_files: dict[Path, list[str]] = {}  # Python files that were run, and the tasks they registered


def register(task: Task) -> Task:
    """Add a task; it is then known by its name wherever tasks are named."""
    if task.name in TASKS:
        raise UserError(f"task {task.name!r} is registered already; choose another name")
    TASKS[task.name] = _named(task)
    return task


def _named(task: Task) -> Task:
    if task.name in TAKEN:
        raise UserError(f"a task cannot be called {task.name!r}, which means something else in a run's records")
    if {"", ".", ".."} & set(task.name.split("/")):  # its predictions go to a file of this name
        raise UserError(f"a task cannot be called {task.name!r}; every part of its name becomes part of a path")
    return task


for _task in (*GLUE, *SUPER_GLUE, *QUESTION_ANSWERING):
    register(_task)


def find_task(name: str) -> Task:
    """A task by its full name, its name without the suite where that is unique, or a user's file or folder.

    `my.jsonl` (also .gz, .zst) is a task whose lines hold `input` and `target`; a folder holds `train.jsonl` and
    `validation.jsonl` of this kind, and maybe `test.jsonl`, whose lines need no `target`. `my.py` is a Python file
    that registers a task, `my.py:news` one of several.
    """
    if name in TASKS:
        return TASKS[name]
    same = [task for task in TASKS.values() if task.short_name == name]
    if len(same) == 1:
        return same[0]
    if same:
        raise UserError(f"task {name!r} could be {' or '.join(t.name for t in same)}; give the whole name")
    if match := re.fullmatch(r"(.+\.py)(?::(.+))?", name):
        return _task_of_file(Path(match[1]), match[2])
    path = Path(name)
    if name and (path.exists() or ".jsonl" in path.suffixes):
        return own_task(path)
    known = [*TASKS, *(task.short_name for task in TASKS.values())]
    hint = did_you_mean(name, known) or "`altup tasks list` shows them."
    raise UserError(f"task {name!r} is not known; {hint} Your own task is a .jsonl file with `input` and `target`")


def _task_of_file(path: Path, name: str | None) -> Task:
    """The task that a user's Python file registers; of several the one with `name`."""
    if not path.is_file():
        raise UserError(f"task {str(path)!r}: no such file")
    key = path.resolve()
    if key not in _files:
        before = set(TASKS)
        _run(key)
        _files[key] = [found for found in TASKS if found not in before]
    found = _files[key]
    if not found:
        raise UserError(f"{path} registers no task; it should call altup.data.tasks.register")
    if not name and len(found) > 1:
        raise UserError(f"{path} registers {', '.join(found)}; give one of them: {path}:{found[0]}")
    if name and name not in found:
        raise UserError(f"{path} registers {', '.join(found)}, and no {name!r}")
    return TASKS[name or found[0]]


def _run(path: Path) -> None:
    """Run a user's own Python file; an error in it names its line."""
    try:
        runpy.run_path(str(path))
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}, line {line or 1}: {reason}; correct the task's file") from error


def find_tasks(names: Iterable[str]) -> list[Task]:
    """The tasks of a list of names, where the name of a suite stands for its tasks; each once, in this order."""
    found: dict[str, Task] = {}
    for name in names:
        for member in SUITES.get(name, (name,)):
            add_task(find_task(member), found)
    if not found:
        raise UserError("no task is named; give --task NAME or --suite NAME (`altup tasks list` shows them)")
    return list(found.values())


def add_task(task: Task, found: dict[str, Task]) -> bool:
    """Add a task to those found; False if it is there already. Two tasks of one name would be confused."""
    if task.name not in found:
        found[task.name] = task
        return True
    if found[task.name] != task:
        raise UserError(f"two tasks are called {task.name!r}; rename one of the files")
    return False


def check_suite(name: str) -> str:
    check_choice("suite", name, SUITES)
    return name


def own_task(path: Path) -> Task:
    """A user's own task from a file (which is then both what is trained on and what is scored) or a folder."""
    if path.is_dir():
        files = {
            split: file
            for split in ("train", "validation", "test")
            for ending in reversed(JSON_LINES)  # where there are several, the first stays
            if (file := path / f"{split}{ending}").exists()
        }
        if not files:
            raise UserError(f"task {str(path)!r}: the folder has no train.jsonl or validation.jsonl (.gz, .zst)")
    elif path.exists():
        files = dict.fromkeys(("train", "validation", "test"), path)
    else:
        raise UserError(f"task {str(path)!r}: no such file")
    name = path.name.partition(".jsonl")[0] or path.resolve().name
    task = Task(
        name=name,
        write=write_pair,
        metrics=("exact_text",),
        description=f"from {path}",
        layout="{input}",
        answer_fields={"target": "?"},
        files=files,
    )
    return _named(task)


def write_pair(record: Record, training: bool) -> list[Example]:
    """What `own_task` writes: the fields `input` and `target` as they are."""
    target = text_of(record, "target")
    return [Example(text_of(record, "input"), target, (target,))]
