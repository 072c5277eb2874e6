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


@pytest.mark.filterwarnings("ignore:altup.accelerate. no GPU")
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_and_prints(number, tmp_path, monkeypatch, capsys):
    """A comment behind a `print` is what it prints."""
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.strip()
    for promised in re.findall(r"^print.*  # (torch\..*)$", SNIPPETS[number], re.MULTILINE):
        assert promised in printed


def anchors(text):
    """The names that GitHub gives to headings."""
    return {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }


FOLDERS = [ROOT / "docs", ROOT / "experiments"]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.rglob("*.md"))]


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


def test_readme_is_one_screen():
    """A package index shows no pictures of the repository, so the text beside each says what it shows."""
    assert len(README.splitlines()) <= 80
    pictures = re.findall(r"!\[(.*?)\]", README)
    assert pictures
    assert all(len(text) > 40 for text in pictures)


def test_the_figures_times_are_those_beside_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from gemma3n_figure import MODELS, WORKLOADS, milliseconds

    (text,) = re.findall(r"!\[(.*?)\]", README)
    measured = [round(milliseconds(model, work)) for work in WORKLOADS for model in MODELS]
    assert [int(number) for number in re.findall(r"\b\d{3}\b", text)] == measured


def test_files_named_in_the_readme_exist():
    for path in re.findall(r"\b(?:docs|benchmarks)/[\w./-]+\w|\b[A-Z]+\.md\b", README):
        assert (ROOT / path).exists(), path


def test_verbs_exist():
    from altup.cli.main import VERBS

    verbs = re.findall(r"(?:^|`)altup (\w+)", README, re.MULTILINE)
    assert verbs
    assert set(verbs) <= set(VERBS)


def test_changelog_and_version_agree():
    import altup

    version = altup.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
