"""CONTRIBUTING's walks lead to code that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import altup

TESTS, ROOT = Path(__file__).parents[1], Path(altup.__file__).parent
TEXT = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")]


def defined(file: str) -> set[str]:
    """Names of all functions, classes and methods of modules that end in this path."""
    trees = [ast.parse((ROOT / found).read_text()) for found in FILES if f"/{found}".endswith(f"/{file}")]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


def test_the_files_that_are_named_exist() -> None:
    named = set(re.findall(r"`(?:(?:src/)?altup/)?([\w/]+\.py)`", TEXT))
    assert len(named) > 50
    beside = [path for folder in ("tests", "experiments") for path in (TESTS.parent / folder).rglob("*.py")]
    known = [*FILES, *(path.relative_to(TESTS.parent).as_posix() for path in beside)]
    assert not [file for file in named if not any(f"/{found}".endswith(f"/{file}") for found in known)]


def test_functions_are_in_the_files_that_they_are_named_with() -> None:
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", TEXT)
    assert len(pairs) > 30
    assert not [(file, name) for file, name in pairs if name.split(".")[0] not in defined(file)]
