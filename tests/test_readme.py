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


def anchors(text):
    """The names that GitHub gives to headings."""
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }


PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = ROOT / page
    for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", here.read_text()):
        path, _, anchor = link.partition("#")
        if "commands/" in path:  # made when the site is built, and checked then
            continue
        there = (here.parent / path) if path else here
        assert there.exists(), link
        assert not anchor or anchor in anchors(there.read_text()), link


def test_readme_works_on_a_package_index():
    """Only the file itself is shown there: no picture of the repository, no link into it, none within the page."""
    assert not re.findall(r"\]\((?!https://)", README)
    assert "<img" not in README
    assert len(README.splitlines()) < 120


def test_files_named_in_the_readme_exist():
    for path in re.findall(r"`((?:docs|benchmarks)/[\w./-]+|[A-Z]+\.md)`", README):
        assert (ROOT / path).exists(), path


def test_verbs_exist():
    from altup.cli.main import VERBS

    for verb in re.findall(r"^altup (\w+)", README, re.MULTILINE):
        assert verb in VERBS


def test_changelog_and_version_agree():
    import altup

    version = altup.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
