"""docs/promises.md: every promise names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@cache
def functions(file: str) -> set[str]:
    """The tests in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_tests_exist() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 40
    assert [file for file, _ in named if not (ROOT / file).exists()] == []
    assert [(file, name) for file, name in named if name and name not in functions(file)] == []
    assert [file for file, _ in named if not functions(file)] == []


def test_every_promise_names_one() -> None:
    promises = re.split(r"^- ", PAGE.partition("## What is not promised")[0], flags=re.MULTILINE)[1:]
    assert len(promises) > 20
    assert [promise.splitlines()[0] for promise in promises if not TEST.search(promise)] == []
