"""One command makes the tables and figures of docs/results.md and of the experiments from the stored runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pages_hold_what_the_command_makes(tmp_path: Path) -> None:
    """Also where somebody had changed a number by hand."""
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    for name in ("docs/results.md", "tools/figure.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/images").mkdir()
    pages = {page: page.read_text() for page in tmp_path.rglob("*.md")}
    page = tmp_path / "docs/results.md"
    page.write_text(re.sub(r"(?m)^\|.*\d\.\d\d\d.*$", lambda line: line[0].replace("3", "4"), pages[page]))
    assert page.read_text() != pages[page]
    subprocess.run([sys.executable, "-m", "experiments.tables"], cwd=tmp_path, check=True)
    assert {page: page.read_text() for page in pages} == pages
    for figure in ("docs/images/results.svg", "docs/images/plateau.svg"):
        assert (tmp_path / figure).read_text() == (ROOT / figure).read_text()
