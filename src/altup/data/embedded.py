"""The embedded corpus: the English that every Python installation carries.

The docstrings of the standard library, read from its source without importing anything, and the help topics of
`pydoc`. Only prose is kept: no code, no tables, no doctests; no paragraph twice.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from altup.core.errors import UserError
from altup.data.bad_input import BadInput

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
LEAST_WORDS = 4


class Embedded:
    """One document a docstring or topic, in the order of the modules' names. Hold 4 % of it out for validation."""

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256("\0".join(documents()).encode()).hexdigest()
        return {"kind": "embedded", "python": platform.python_version(), "sha256": digest}

    def read(self, bad_input: BadInput, cursor: Any = None, one_file: bool = False) -> _EmbeddedReader:
        return _EmbeddedReader(cursor or 0)

    def files(self) -> list[tuple[Any, int]]:
        return [(0, self.text_bytes())]

    def file_of(self, cursor: Any) -> int:
        return 0

    def parts(self) -> list[Embedded]:
        return [self]

    def text_bytes(self) -> int:
        return sum(len(text) for text in documents())


class _EmbeddedReader:
    def __init__(self, cursor: int):
        self._next = cursor

    def __iter__(self) -> Iterator[str]:
        for text in documents()[self._next :]:
            self._next += 1
            yield text

    def cursor(self) -> Any:
        return self._next

    def fraction(self) -> float | None:
        return self._next / len(documents())


@cache
def documents() -> tuple[str, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            for text in _strings(path):
                kept = [paragraph for paragraph in dict.fromkeys(_prose(text)) if paragraph not in seen]
                seen.update(kept)
                if kept:
                    found.append("\n".join(kept))
    if not found:
        raise UserError(f"the standard library in {root} has no source to read; give a source of your own")
    return tuple(found)


def _strings(path: Path) -> Iterator[str]:
    """Docstrings of a module in the order of the source; for the help topics, their texts."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # templates and files for other Pythons
    if path.match("pydoc_data/topics.py"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                yield from (
                    v.value for v in node.values if isinstance(v, ast.Constant) and isinstance(v.value, str)
                )
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # expressions, most of a tree, hold no docstring
        nodes += [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr)]
    for node in sorted((n for n in nodes if isinstance(n, documented)), key=lambda n: getattr(n, "lineno", 0)):
        if text := ast.get_docstring(node):
            yield text


def _prose(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        if ">>>" in paragraph or re.search(
            r"[=_*#|~^-]{4}|::=|\\\\|[{}]$|  {3,}\S+  {3,}", paragraph, re.MULTILINE
        ):
            continue
        joined = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c == " " for c in joined)
        words = re.findall(r"[A-Za-z]{2,}", joined)
        if len(words) >= LEAST_WORDS and letters >= 0.75 * len(joined):
            yield joined
