"""The notebooks are what their pages make, and are notebooks."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "tools/notebooks.py"))


@pytest.mark.parametrize("name", MADE["LESSONS"])
def test_notebook_is_its_page(name):
    stored = (ROOT / f"docs/notebooks/{name}.ipynb").read_text()
    assert stored == MADE["as_text"](name), "run `python tools/notebooks.py`"
    cells = json.loads(stored)["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for text in code:
        if not text.startswith(("!", "%%")):
            compile(text, name, "exec")


def test_shell_and_files_become_cells():
    code = ["".join(cell["source"]) for cell in MADE["notebook"]("task")["cells"] if cell["cell_type"] == "code"]
    assert any(text.startswith("!altup finetune") for text in code)
    assert any(text.startswith("%%writefile my_tasks.py") for text in code)
