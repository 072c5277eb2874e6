"""`altup compare` as a user meets it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from altup.cli.main import app
from altup.core.errors import UserError
from altup.training.pretraining import PretrainConfig, pretrain
from tests.cli.test_demo import Balanced
from tests.cli.test_study import look
from tests.processes import prepare_text

SHAPE = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A T5 and a decoder, each trained for four steps."""
    folder = tmp_path_factory.mktemp("runs")
    data, found = prepare_text(folder), {}
    for model in ("t5", "decoder"):
        config = PretrainConfig(
            data=str(data), model=model, size="tiny", model_overrides=SHAPE, steps=4, batch_size=4,
            inputs_length=32, eval_every=2, log_every=1, eval_sequences=8,
        )  # fmt: skip
        found[model] = folder / f"{model}-run"
        assert pretrain(config, found[model]).finished
    return found


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def last(run: Path, name: str) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r[name] for r in map(json.loads, lines) if r["split"] == "validation"][-1]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, Path]) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("compare") / "page.html"
    result = compare(runs["t5"], runs["decoder"], "--out", out)
    assert result.exit_code == 0, result.output
    return out, result


def test_the_terminal_shows_figures_curves_and_settings(page: tuple[Path, Result], runs: dict[str, Path]) -> None:
    lines = page[1].output.splitlines()
    assert max(len(line) for line in lines if str(page[0]) not in line) <= 80
    first = next(line.split() for line in lines if line.strip().startswith("t5-run"))
    t5 = runs["t5"]
    assert first[1:4] == ["4", f"{last(t5, 'loss'):.4f}", f"{100 * last(t5, 'accuracy'):.2f}"]
    assert any(line.split()[:3] == ["model", "t5", "decoder"] for line in lines)
    assert "do not compare" in " ".join(page[1].output.split())  # span corruption against causal
    assert lines[-1] == f"Page with the curves: {page[0]}"


def test_the_page_stands_alone_and_holds_the_curves(page: tuple[Path, Result], runs: dict[str, Path]) -> None:
    text = page[0].read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert parser.loads == []
    loss = parser.hover[0]["series"]
    assert [line["name"] for line in loss] == ["t5-run", "decoder-run"]
    assert loss[1]["points"][-1][3] == f"{last(runs['decoder'], 'loss'):.4f}"


def test_a_narrow_terminal_gets_paragraphs_and_loses_nothing(tmp_path: Path, runs: dict[str, Path]) -> None:
    copies = [shutil.copytree(runs["t5"], tmp_path / f"a-run-with-a-long-name-{n}") for n in range(4)]
    config = (copies[1] / "config.yaml").read_text()
    (copies[1] / "config.yaml").write_text(re.sub(r"^lr: .*", "lr: 0.0123456", config, flags=re.MULTILINE))
    result = compare(*copies, "--no-page")
    assert result.exit_code == 0, result.output
    assert "…" not in result.output.replace("name…", "")
    assert "0.0123456" in result.output
    assert not (Path("compare.html")).exists()


def test_mistakes_are_sentences(tmp_path: Path, runs: dict[str, Path]) -> None:
    def told(*arguments: object) -> str:
        result = compare(*arguments, "--out", tmp_path / "page.html")
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    t5, folder = runs["t5"], runs["t5"].parent
    (folder / "expected.json").write_text("{}")
    assert "one run has nothing to be compared with" in told(t5)
    assert "is given twice" in told(t5, folder / "data" / ".." / "t5-run")
    assert f"did you mean '{t5}'" in told(t5, folder / "t5-rum")
    assert "is no run: it has no config.yaml" in told(t5, folder / "data")
    assert "not a whole record" in told(t5, folder / "expected.json")
    assert "give at most 14" in told(*[t5] * 15)
    assert not (tmp_path / "page.html").exists()


def test_nothing_that_is_not_ours_is_written_over(tmp_path: Path, runs: dict[str, Path]) -> None:
    (tmp_path / "mine.html").write_text("mine")
    assert "is not a comparison" in str(
        compare(runs["t5"], runs["decoder"], "--out", tmp_path / "mine.html").exception
    )
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert "is a folder" in str(compare(runs["t5"], runs["decoder"], "--out", tmp_path).exception)


@pytest.mark.slow
def test_a_real_browser_shows_it(page: tuple[Path, Result], tmp_path: Path) -> None:
    shown = look(page[0], tmp_path, "--dump-dom")
    assert "Uncaught" not in shown.stderr
    assert re.search(r"<svg[^>]*data-hover", shown.stdout)
