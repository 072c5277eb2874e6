"""Scores of one model come together in its folder, whatever the order of the commands; those of another do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from altup.cli.main import app
from tests.evaluation.tiny import save_tiny


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data of two tasks of GLUE, where the user stands."""
    for name in ("sst2", "cola"):
        folder = tmp_path / "data" / "glue" / name
        folder.mkdir(parents=True)
        lines = [{"sentence": f"it is {word}", "label": i % 2} for i, word in enumerate(("bad", "good", "dire"))]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "validation.jsonl").write_text(text + '{"sentence": "no label"}\n' * (name == "sst2"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(model: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The stored scores, and what was said."""
    result = CliRunner(env={"COLUMNS": "140"}).invoke(
        app, ["evaluate", str(model), *arguments, "--data", "data", "--out", "out", "--on-error", "skip"]
    )
    assert result.exit_code == 0, result.output
    return json.loads(Path("out/scores.json").read_text()), result.output


def change_weights(model: Path) -> None:
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    network = AltUpT5ForConditionalGeneration.from_pretrained(model)
    with torch.no_grad():
        next(network.parameters()).add_(1.0)
    network.save_pretrained(model)


def test_scores_of_the_same_model_add_up(home: Path) -> None:
    model = save_tiny(home / "run" / "final")
    first, _ = evaluate(model, "--task", "sst2")
    both, said = evaluate(model, "--task", "cola")
    assert [task["task"] for task in both["tasks"]] == ["glue/sst2", "glue/cola"]
    assert both["tasks"][0] == first["tasks"][0]
    assert both["skipped"] == first["skipped"] != {}
    mean = sum(task["score"] for task in both["tasks"]) / 2
    assert both["suites"][0]["score"] == pytest.approx(mean)
    assert both["suites"][0]["partial"] is True
    assert "glue/qnli: not scored" in both["suites"][0]["missing"]
    assert "glue/sst2" in said
    at_once, _ = evaluate(model, "--task", "sst2", "--task", "cola")
    assert at_once == both


def test_another_limit_replaces_that_task_and_says_so(home: Path) -> None:
    model = save_tiny(home / "model")
    before, _ = evaluate(model, "--task", "sst2", "--task", "cola")
    after, said = evaluate(model, "--task", "cola", "--limit", "2")
    assert after["tasks"][0] == before["tasks"][0]
    assert (after["tasks"][1]["limit"], after["tasks"][1]["examples"]) == (2, {"validation": 2})
    assert "glue/cola: the score with no limit is replaced by one with --limit 2" in said
    assert "(--limit 2)" in said


def test_scores_of_other_weights_are_replaced_with_a_line(home: Path) -> None:
    model = save_tiny(home / "model")
    evaluate(model, "--task", "sst2")
    change_weights(model)
    after, said = evaluate(model, "--task", "cola")
    assert [task["task"] for task in after["tasks"]] == ["glue/cola"]
    assert "belongs to another checkpoint" in said
    assert "glue/sst2 are replaced" in said
    Path("out/scores.json").write_text('{"model": "mine", "tasks": [{}]}')
    assert "cannot be read; it is replaced" in evaluate(model, "--task", "sst2")[1]
    assert "glue/sst2: its earlier score and predictions are replaced" in evaluate(model, "--task", "sst2")[1]


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("scores.json", '{"tasks": [{', ()),
        ("scores.json", '{"player": 3}', ()),
        ("glue/cola.validation.jsonl", '{"input": "mine", "target": "1"}\n', ()),
        ("predictions/glue/cola.validation.jsonl", "mine", ("--predict-only", "--split", "validation")),
    ],
)
def test_what_no_evaluation_wrote_is_left_alone(
    home: Path, name: str, text: str, options: tuple[str, ...]
) -> None:
    from altup.core.errors import UserError

    path = home / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (home / "model").mkdir()  # it is not even loaded
    (home / "model" / "config.json").write_text("{}")
    arguments = ["evaluate", "model", "--task", "cola", "--data", "data", "--out", "out", *options]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError), result.output
    assert f"{name} is not of an evaluation and would be written over" in str(result.exception)
    assert [file for file in (home / "out").rglob("*") if file.is_file()] == [path]
    assert path.read_text() == text


def test_scores_that_training_left_for_a_step_are_kept(home: Path) -> None:
    """A stopped run is evaluated by its newest checkpoint, in the folder where training put that step's scores."""
    from altup.core.sealed_folders import atomic_folder
    from altup.evaluation.scores import TaskScore, summarise, write_scores

    (home / "run").mkdir()
    atomic_folder(home / "run" / "checkpoints", "step-2", lambda folder: (save_tiny(folder), None)[1])
    of_training = TaskScore("mine", {"accuracy": 50.0}, {"validation": 4})
    place = home / "run" / "evaluation" / "step-2"
    write_scores(place, summarise([of_training], "step-2"))
    result = CliRunner().invoke(app, ["evaluate", "run", "--task", "cola", "--data", "data"])
    assert result.exit_code == 0, result.output
    assert [t["task"] for t in json.loads((place / "scores.json").read_text())["tasks"]] == ["mine", "glue/cola"]


def test_checkpoints_of_two_runs_have_folders_of_their_own(home: Path) -> None:
    for name in ("one", "two"):
        for part in ("checkpoints/step-2", "final"):
            save_tiny(home / "runs" / name / part)
            result = CliRunner().invoke(
                app, ["evaluate", f"runs/{name}/{part}", "--task", "cola", "--data", "data"]
            )
            assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (home / "evaluation").iterdir()) == [
        *("one-final", "one-step-2", "two-final", "two-step-2")
    ]
