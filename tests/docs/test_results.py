"""The page of results and the report say the same: both are made from benchmarks/results/studies."""

from __future__ import annotations

import re
from pathlib import Path

from altup.studies.report import StudyReport

ROOT = Path(__file__).resolve().parents[2]
NUMBER = re.compile(r"[+−]\d+\.\d+")


def test_the_page_agrees_with_the_report() -> None:
    """Differences, intervals and verdicts of the runs with the paper's shapes."""
    cards = StudyReport([ROOT / "benchmarks" / "results" / "studies"], "mini-adamw").cards
    lines = (ROOT / "docs" / "results.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| AltUp")]
    own = [row for row in rows if row[1].startswith(("paper's small", "the same"))]
    assert own
    for claim, _, accuracy, loss, _, verdict in own:
        same = [card for card in cards if card.verdict == verdict and card.claim == "AltUp K=2 better than Dense"]
        found = {number for card in same for number in NUMBER.findall(f"{card.number} {card.why}")}
        assert set(NUMBER.findall(accuracy)) <= found, claim
        if verdict != "not visible":  # the report judges the loss in equal time alone
            assert set(NUMBER.findall(loss)) <= found, claim
