"""Every block of the home page, "Start here", the tutorials and of the rule's page runs, as a reader would run it.

The numbers that decide how long they take are replaced by toy ones (`pages.TOY`); nothing else is.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from altup.data.tasks import TASKS
from tests.docs.pages import DOCS, blocks, run_page

# What a page says it needs, by the pages that make it.
NEEDS = {f"tutorials/{name}.md": ("tutorials/pretrain.md",) for name in ("task", "study", "many-gpus")}
NEEDS["extend.md"] = ("tutorials/pretrain.md",)
SLOW = {"tutorials/many-gpus.md"}  # starts processes that import everything anew
PAGES = [
    "index.md",
    "start.md",
    "rule.md",
    "extend.md",
    *(f"tutorials/{path.name}" for path in sorted((DOCS / "tutorials").glob("[!i]*.md"))),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A page run in a folder that all pages share, after those it needs. Tasks that pages register go again."""
    known = dict(TASKS)
    folder: Path = tmp_path_factory.mktemp("reader")

    @cache
    def once(page: str) -> str:
        for other in NEEDS.get(page, ()):
            once(other)
        return run_page(page, folder)

    yield once
    TASKS.clear()
    TASKS.update(known)


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in PAGES])
def test_page_runs(page, run):
    assert run(page).strip()


def test_all_three_extensions_train(run):
    assert run("extend.md").count("finished=True") == 3


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_out(page):
    """A block that is not run is plain `text`: what a program printed, or a command for another machine."""
    assert {block.language for block in blocks(page) if not block.runs} <= {"text"}
    assert any(block.runs for block in blocks(page))
