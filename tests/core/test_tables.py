"""Tables fit the terminal, and no number is cut."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from altup.core.tables import print_table

WORDS = st.text("abcdefg ", min_size=1, max_size=50).filter(lambda text: text.strip() == text)
NUMBERS = st.integers(0, 10**12).map("{:,}".format)


def render(head: list[str], rows: list[list[str]], width: int) -> list[str]:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width), head, rows)
    return stream.getvalue().splitlines()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_number_is_whole_and_no_line_too_long(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 9))
    width = data.draw(st.integers(40, 130))
    rows = data.draw(
        st.lists(st.tuples(WORDS, *[NUMBERS] * columns).map(list), min_size=1, max_size=4), label="rows"
    )
    lines = render(["model", *(f"column {n}" for n in range(columns))], rows, width)
    assert max(map(len, lines)) <= width
    shown = [word for line in lines for word in line.split()]
    for row in rows:
        for number in row[1:]:
            assert number in shown


def test_a_wide_table_becomes_two_below_one_another() -> None:
    head, rows = ["model", "accuracy", "loss"], [["dense", "38.18 ± 0.08", "3.9"], ["altup", "38.46", ""]]
    assert [line.rstrip() for line in render(head, rows, 60)] == [
        "model      accuracy  loss",
        "──────────────────────────",
        "dense  38.18 ± 0.08   3.9",
        "altup         38.46",
        "",
    ]
    assert [line.rstrip() for line in render(head, rows, 24)] == [
        "model      accuracy",
        "────────────────────",
        "dense  38.18 ± 0.08",
        "altup         38.46",
        "",
        "model  loss",
        "────────────",
        "dense   3.9",
        "",
    ]


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/]"])
def test_square_brackets_are_text(text: str) -> None:
    assert any(text in line for line in render(["model", text], [[text, "1"]], 60))
