"""The site that `make docs` builds: complete, and without anything from the web."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import altup
from altup.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"


def test_every_public_name_has_a_place():
    text = "".join(path.read_text() for path in REFERENCE.glob("*.md"))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: altup\.(\S+)$", text, re.MULTILINE)}
    assert {name for name in altup.__all__ if not name.startswith("_")} <= shown


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in navigation


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs `pip install 'altup[docs]'`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_site_fetches_nothing(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", page.read_text()
        )
        assert not fetched, f"{page.name}: {fetched}"


@pytest.mark.slow
def test_every_verb_has_a_page(site):
    for verb in VERBS:
        assert "--" in (site / f"reference/commands/{verb}.html").read_text()
    assert "--batch-size" in (site / "reference/commands/pretrain.html").read_text()


@pytest.mark.slow
def test_examples_are_code(site):
    for page in (site / "reference").glob("*.html"):
        assert "<blockquote>" not in page.read_text(), f"{page.name}: the section is called `Examples:`"


@pytest.mark.slow
def test_formulas_are_drawn_without_a_script(site):
    page = (site / "math.html").read_text()
    assert page.count("<math") > 30
    assert "arithmatex" not in page


@pytest.mark.slow
def test_search_works_from_the_disk(site):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    address = f"{(site / 'index.html').as_uri()}?q=plateau"
    command = [browser, "--headless", "--no-sandbox", "--virtual-time-budget=8000", "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    assert re.search(r"\d+ matching documents", page)
