"""Pages that can be read: short paragraphs, lines that are wrapped one way, and each page says whom it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LONGEST_LINE, WRAP, WORDS = 200, 120, 80
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def prose(page: str) -> str:
    """A page without its front matter, code and formulas."""
    text = re.sub(r"\A---\n.*?^---\n", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)


def paragraphs(page: str) -> list[str]:
    """Paragraphs, items of lists and cells of tables."""
    lines = []
    for line in prose(page).splitlines():
        if line.startswith("|"):
            lines += ["", *[f"{cell}\n" for cell in line.split("|")], ""]
        elif re.match(r"\s*([-*]|\d+\.|:) |#|<", line):
            lines += ["", line]
        else:
            lines.append(line)
    return [part for part in re.split(r"\n\s*\n", "\n".join(lines)) if part.strip()]


@pytest.mark.parametrize("page", PAGES)
def test_no_long_lines(page):
    long = [n for n, line in enumerate((DOCS / page).read_text().splitlines(), 1) if len(line) > LONGEST_LINE]
    assert not long, f"lines {long} have more than {LONGEST_LINE} characters"


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page):
    """Prose ends before column 120; tables, whose rows cannot be broken, may be longer."""
    long = [line for line in prose(page).splitlines() if len(line) > WRAP and not line.startswith("|")]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES)
def test_paragraphs_are_short(page):
    long = [part for part in paragraphs(page) if len(part.split()) >= WORDS]
    assert not long, f"{WORDS} words or more:\n\n" + "\n\n".join(long)
