"""Tutorials as Jupyter notebooks, made from their pages: `python tools/notebooks.py`.

A page is the only source. Its shell blocks become `!` cells, a block with a title the file of that name, and the
rest text. A test compares docs/notebooks with what this makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOKS = DOCS / "notebooks"
LESSONS = ("pretrain", "widen", "task")
FENCE = re.compile(r'^```(sh|python|yaml)(?: title="([^"]+)")?\n(.*?)^```$\n?', re.MULTILINE | re.DOTALL)
NOTE = (
    "*This notebook is made from `docs/tutorials/{name}.md`; change that page, not this file. It needs `altup` "
    "in the environment of its kernel.*"
)


def notebook(name: str) -> dict[str, Any]:
    """The notebook of a lesson, in format 4.5."""
    text = (DOCS / "tutorials" / f"{name}.md").read_text()
    cells: list[tuple[str, str]] = []
    end = 0
    for match in FENCE.finditer(text):
        cells.append(("markdown", text[end : match.start()]))
        cells.append(("code", _code(*match.groups())))
        end = match.end()
    cells.append(("markdown", text[end:]))
    cells[0] = ("markdown", f"{cells[0][1].rstrip()}\n\n{NOTE.format(name=name)}")
    return {
        "cells": [_cell(n, kind, body) for n, (kind, body) in enumerate(cells) if body.strip()],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _code(language: str, title: str | None, text: str) -> str:
    if title:
        return f"%%writefile {title}\n{text}"
    if language == "sh":
        return re.sub(r"^(?=\w)", "!", text, flags=re.MULTILINE)
    return text


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    if kind == "markdown":  # links to pages beside this one
        text = re.sub(r"\]\((?!\.\./|https?:|#)", "](../tutorials/", text)
    lines = text.strip("\n").splitlines(keepends=True)
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def as_text(name: str) -> str:
    return json.dumps(notebook(name), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    NOTEBOOKS.mkdir(exist_ok=True)
    for lesson in LESSONS:
        (NOTEBOOKS / f"{lesson}.ipynb").write_text(as_text(lesson))
        print(NOTEBOOKS / f"{lesson}.ipynb")
