"""`altup compare` as a user meets it, with runs that older versions left."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from altup.cli.main import app
from altup.core.errors import UserError
from tests.cli.test_demo import Balanced
from tests.cli.test_study import look

LEGACY = Path(__file__).parents[1] / "legacy"
T5, DECODER, TUNED = (LEGACY / f"{kind}-finished" for kind in ("t5", "decoder", "finetuned"))


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def last(run: Path, name: str) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r[name] for r in map(json.loads, lines) if r["split"] == "validation"][-1]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("compare") / "page.html"
    result = compare(T5, DECODER, "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


def test_the_terminal_shows_figures_curves_and_settings(page: tuple[Path, Result]) -> None:
    lines = page[1].output.splitlines()
    assert max(len(line) for line in lines if str(page[0]) not in line) <= 80
    first = next(line.split() for line in lines if line.strip().startswith("t5-finished"))
    assert first[1:4] == ["14", f"{last(T5, 'loss'):.4f}", f"{100 * last(T5, 'accuracy'):.2f}"]
    assert any(line.split()[:3] == ["model", "t5", "decoder"] for line in lines)
    assert "do not compare" in " ".join(page[1].output.split())  # span corruption against causal
    assert lines[-1] == f"Page with the curves: {page[0]}"


def test_the_page_stands_alone_and_holds_the_curves(page: tuple[Path, Result]) -> None:
    text = page[0].read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.loads == []
    loss = parser.hover[0]["series"]
    assert [line["name"] for line in loss] == ["t5-finished", "decoder-finished"]
    assert loss[1]["points"][-1][3] == f"{last(DECODER, 'loss'):.4f}"


def test_a_narrow_terminal_gets_paragraphs_and_loses_nothing(tmp_path: Path) -> None:
    runs = [shutil.copytree(TUNED, tmp_path / f"a-run-with-a-long-name-{n}") for n in range(4)]
    (runs[1] / "config.yaml").write_text((TUNED / "config.yaml").read_text().replace("lr: 0.01", "lr: 0.0123456"))
    result = compare(*runs, "--no-page")
    assert result.exit_code == 0, result.output
    assert "…" not in result.output.replace("name…", "")
    assert "0.0123456" in result.output
    assert not (Path("compare.html")).exists()


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    def told(*arguments: object) -> str:
        result = compare(*arguments, "--out", tmp_path / "page.html")
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert "one run has nothing to be compared with" in told(T5)
    assert "is given twice" in told(T5, LEGACY / "data" / ".." / "t5-finished")
    assert f"did you mean '{T5}'" in told(T5, LEGACY / "t5-finishd")
    assert "is no run: it has no config.yaml" in told(T5, LEGACY / "data")
    assert "not a whole record" in told(T5, LEGACY / "expected.json")
    assert "give at most 14" in told(*[T5] * 15)
    assert not (tmp_path / "page.html").exists()


def test_nothing_that_is_not_ours_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    assert "is not a comparison" in str(compare(T5, DECODER, "--out", tmp_path / "mine.html").exception)
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert "is a folder" in str(compare(T5, DECODER, "--out", tmp_path).exception)


@pytest.mark.slow
def test_a_real_browser_shows_it(page: tuple[Path, Result], tmp_path: Path) -> None:
    shown = look(page[0], tmp_path, "--dump-dom")
    assert "Uncaught" not in shown.stderr
    assert re.search(r"<svg[^>]*data-hover", shown.stdout)
