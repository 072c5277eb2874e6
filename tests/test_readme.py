"""The README's Python runs as it stands, and its files and verbs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_snippets():
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_verbs_exist():
    from altup.cli.main import VERBS

    for verb in re.findall(r"^altup (\w+)", README, re.MULTILINE):
        assert verb in VERBS


def test_changelog_and_version_agree():
    import altup

    assert f'version = "{altup.__version__}"' in (ROOT / "pyproject.toml").read_text()
