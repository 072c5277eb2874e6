"""What `altup study table` shows in a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from altup.cli.main import app
from altup.studies.report import StudyReport
from altup.studies.terminal import print_study
from tests.studies.samples import TEXT

RESULTS = Path(__file__).parent / "stored"


@pytest.fixture(scope="module")
def report() -> StudyReport:
    return StudyReport([RESULTS])


def render(report: StudyReport, name: str, width: int = 80, sweeps: Any = None) -> str:
    stream = io.StringIO()
    study = next(study for study in report.studies if study.name == name)
    print_study(Console(file=stream, width=width), study, report.stats, sweeps or {})
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 60])
def test_all_studies_fit(report: StudyReport, width: int) -> None:
    for study in report.studies:
        text = render(report, study.name, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


def test_numbers_of_paper_and_ours_stand_side_by_side(report: StudyReport) -> None:
    lines = render(report, "varying-k").splitlines()
    dense = next(line for line in lines if line.startswith("small · Dense"))
    assert dense.split()[3:] == ["2", "61.21", "38.18", "±", "0.08", "3.895", "±", "0.005"]
    gains = lines[lines.index(dense) + 2]
    assert gains.split() == ["+0.65", "+0.29", "±", "0.09", "−0.058", "±", "0.005"]
    assert "SQuAD EM (%)  SQuAD EM (%)" in "\n".join(lines)  # a pair is never parted
    assert "not run at this scale: base, large." in "\n".join(lines)


def test_claims_end_with_their_verdict(report: StudyReport) -> None:
    told = " ".join(render(report, "varying-k").split())
    assert "AltUp K=2 better than Dense in held-out accuracy: +0.29 ± 0.09 %" in told
    assert "(small; 2 seeds): not visible" in told


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_a_study_without_runs_says_how_to_make_them(form: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(TEXT.replace("k: 2", "k: 7").replace("dense", "sum"))
    command = ["study", "table", "continuing", str(own), "--results", str(RESULTS), "--format", form]
    told = CliRunner().invoke(app, command)
    assert "Which?" not in told.stdout  # the question of a study without any number
    assert f"run what is missing: altup study run continuing {own} --scale mini" in told.stderr


def test_sweeps_are_a_table_too(report: StudyReport) -> None:
    runs = [({"lr": 0.1}, 3.5, "a"), ({"lr": 0.2}, 3.25, "b")]
    sweep = {"grid": {"lr": [0.1, 0.2]}, "chosen": {"lr": 0.2}, "runs": runs, "seed": 9, "steps": 1000}
    sweep["curves"] = {"lr": [(0.1, 3.5), (0.2, 3.25)]}
    text = render(report, "varying-k", sweeps={("Dense", "small"): sweep})
    assert "tuned with seed 9 in runs of 1,000 steps" in " ".join(text.split())
    assert "3.250" in text
    assert "|" not in text
