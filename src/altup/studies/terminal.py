"""Studies in a terminal: what was measured beside the paper's numbers, and the outcome of the claims."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from altup.core.tables import print_table
from altup.studies.comparison import NOT_RUN, compare, measures_shown, show_pair
from altup.studies.records import Record
from altup.studies.statistics import CONTRADICTED, REPRODUCED, Statistics
from altup.studies.study import METRICS, Study
from altup.studies.sweep_figures import introduce_sweeps, sweep_lines
from altup.studies.tables import tell_claims, text_speedups

if TYPE_CHECKING:
    from altup.core.terminal import Console

HEAD = 14  # columns of a measure's name, which may take several lines
STYLES = {REPRODUCED: "bold green", CONTRADICTED: "bold red"}


def print_study(
    console: Console, study: Study, stats: Statistics, sweeps: Mapping[tuple[str, str], Record]
) -> None:
    """The models that were run, with the measures that there are of them: each beside the paper's number."""
    console.print(study.title, style="bold", markup=False)
    console.print(study.question, markup=False)
    console.print()
    rows = compare(study, stats)
    run = [row for row in rows if row.run]
    shown = [m for m in measures_shown(rows, study) if any(row.cells[m].ours is not None for row in run)]
    head, body = ["model", "seeds"], [[row.name, row.count] for row in run]
    joined: set[int] = set()
    for m in shown:
        title = "\n".join(textwrap.wrap(METRICS[m].head, HEAD))
        pairs = [show_pair(row.cells[m], m) for row in run]
        for who, texts in (("paper", [theirs for theirs, _ in pairs]), ("ours", [ours for _, ours in pairs])):
            if any(texts):
                if who == "ours" and head[-1].endswith("paper"):
                    joined.add(len(head))
                head.append(f"{title}\n{who}")
                for line, text in zip(body, texts, strict=True):
                    line.append(_with_gain(text))
    if shown:
        print_table(console, head, body, joined=joined)
        if any("\n" in cell for line in body for cell in line):
            console.print(f"Below a score: its difference to {study.baseline} of the same size.", style="dim")
    absent = dict.fromkeys(row.size for row in rows if not row.run)
    if absent:
        console.print(f"Rows of the paper that were {NOT_RUN}: {', '.join(absent)}.", style="dim")
    if told := text_speedups(study, stats):
        console.print(f"\n{told}", markup=False, end="")
    _print_claims(console, study, stats)
    if sweeps:
        first, *lines = sweep_lines(sweeps)
        console.print(introduce_sweeps(sweeps), markup=False)
        print_table(console, first, lines)
    console.print()


def _print_claims(console: Console, study: Study, stats: Statistics) -> None:
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid(padding=(0, 1))
    for claim, word in tell_claims(study, stats):
        lines.add_row("•", Text.assemble(f"{claim}: ", (word, STYLES.get(word, "bold"))))
    if lines.row_count:
        console.print(lines)


def _with_gain(text: str) -> str:
    """`61.86 (+0.65)` with the gain below the number."""
    number, _, gain = text.partition(" (")
    return f"{number}\n{gain.removesuffix(')')}" if gain else number
