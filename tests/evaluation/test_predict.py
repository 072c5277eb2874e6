"""`altup evaluate --predict-only`: what a user needs to submit a test set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.data.tasks import find_task
from altup.evaluation.metrics import predicted_label
from tests.evaluation.tiny import save_tiny

SENTENCES = ("it is bad", "it is good", "it is dire")
PRONOUN = {"text": "Al saw that he sat", "span1_text": "al", "span2_text": "he", "span2_index": 3, "idx": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with test sets as Hugging Face has them, where the user stands."""
    data = tmp_path / "data"
    unlabelled = [{"sentence": text, "label": -1, "idx": i + 10} for i, text in enumerate(SENTENCES)]
    write(data / "glue/cola/test.jsonl", unlabelled)
    write(data / "glue/cola/validation.jsonl", [{**record, "label": 1} for record in unlabelled])
    write(data / "super_glue/wsc/test.jsonl", [{**PRONOUN, "label": -1}])
    asked = {"hypothesis": "It rains.", "premise": "It pours.", "label": -1, "idx": 0}
    for part in ("matched", "mismatched"):
        write(data / f"glue/mnli/test_{part}.jsonl", [asked])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(model: Path, *arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["evaluate", str(model), *arguments, "--data", "data", "--out", "out", "--targets-length", "9"]
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"out/predictions/{name}.jsonl").read_text().splitlines()]


def test_a_test_set_is_answered_and_nothing_is_scored(home: Path, model: Path) -> None:
    said = run(model, "--predict-only", "--task", "cola", "--task", "wsc")
    assert "glue/cola, test: 3 predictions (3 are no label)" in said
    assert sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.json*")) == [
        "predictions/glue/cola.test.jsonl",
        "predictions/super_glue/wsc.test.jsonl",
    ]
    for i, line in enumerate(lines_of("glue/cola.test")):
        assert list(line) == ["idx", "input", "prediction", "label"]
        assert (line["idx"], line["input"], line["label"]) == (i + 10, f"cola sentence: {SENTENCES[i]}", None)
    (line,) = lines_of("super_glue/wsc.test")
    assert (line["idx"], line["input"]) == (4, "wsc: Al saw that *he* sat")
    (example,) = find_task("wsc").write({**PRONOUN, "label": 0}, False)
    assert {"label": line["label"]} == predicted_label(find_task("wsc"), line["prediction"], example)


def test_predictions_are_those_that_an_evaluation_scores(home: Path, model: Path) -> None:
    """Whether they have labels or not; and scores that are there stay as they are."""
    run(model, "--task", "cola")
    scores = Path("out/scores.json").read_bytes()
    scored = [json.loads(line) for line in Path("out/glue/cola.validation.jsonl").read_text().splitlines()]
    for split in ("test", "validation"):
        run(model, "--predict-only", "--task", "cola", "--split", split, "--limit", "2")
        found = [line["prediction"] for line in lines_of(f"glue/cola.{split}")]
        assert found == [line["prediction"] for line in scored[:2]]
    assert Path("out/scores.json").read_bytes() == scores


def test_a_suite_is_answered_as_far_as_it_is_there(home: Path, model: Path) -> None:
    found = json.loads(run(model, "--predict-only", "--suite", "glue", "--json"))
    assert [(split["task"], split["split"]) for split in found["predictions"]] == [
        ("glue/cola", "test"),
        ("glue/mnli", "test_matched"),
        ("glue/mnli", "test_mismatched"),
    ]
    assert all(Path(split["file"]).is_file() for split in found["predictions"])


def test_own_records_need_no_target(home: Path, model: Path) -> None:
    write(home / "sums.jsonl", [{"input": "1 + 1"}, {"id": "b", "input": "1 + 2"}])
    run(model, "--predict-only", "--task", "sums.jsonl")
    first, second = lines_of("sums.test")
    assert (first["idx"], first["input"], list(first)) == (0, "1 + 1", ["idx", "input", "prediction"])
    assert second["id"] == "b"


def test_mistakes_are_explained(home: Path, model: Path) -> None:
    write(home / "data/glue/sst2/validation.jsonl", [{"sentence": "a", "label": -1}])
    for flags in ((), ("--on-error", "skip")):
        with pytest.raises(UserError, match="--predict-only"):
            run(model, "--task", "sst2", *flags)
    with pytest.raises(UserError, match=r"--split test goes with --predict-only"):
        run(model, "--task", "cola", "--split", "test")
    with pytest.raises(UserError, match=r"glue/sst2 has no test\.jsonl"):
        run(model, "--predict-only", "--task", "sst2")
    write(home / "data/glue/sst2/test.jsonl", [{"sentence": "a", "label": -1}, {"sentence": "b", "label": 0}])
    with pytest.raises(UserError, match=r"line 2 has a label, and .*line 1 has none"):
        run(model, "--predict-only", "--task", "sst2", "--on-error", "skip")
    assert not Path("out").exists()
