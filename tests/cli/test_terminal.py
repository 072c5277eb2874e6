"""What verbs print fits a terminal of 80 columns, and no number in it is cut."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from altup.cli.evaluate import score_table
from altup.cli.main import app
from altup.data.tasks import SUITES, TASKS
from altup.evaluation.scores import TaskScore


def check(text: str) -> None:
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ["params"],
        ["params", "--size", "xl", "--method", "altup+moe", "--k", "4"],
        ["study", "list"],
        ["study", "run", "varying-k", "sequence", "--scale", "paper", "--dry-run", "--device", "H200"],
        ["tasks", "list"],
        ["tasks", "show", "squad"],
    ],
)
def test_it_fits(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    check(result.stdout)


def test_scores_fit() -> None:
    scores = [
        TaskScore(name, dict.fromkeys(TASKS[name].metrics, 100 / 3), {"validation": 40_430}, limit=100_000)
        for name in SUITES["glue"]
    ]
    stream = io.StringIO()
    Console(file=stream, width=80).print(score_table(scores, "/a/long/path/to/the/" + "run/" * 20))
    text = stream.getvalue()
    check(text)
    assert text.count("40,430") == len(scores)
    assert text.count("33.33") >= 2 * len(scores)
