"""`altup tasks` and `altup evaluate` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from tests.evaluation.tiny import save_tiny

run = CliRunner(env={"COLUMNS": "120"})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "glue" / "sst2"
    folder.mkdir(parents=True)
    lines = [{"sentence": f"it is {word}", "label": i % 2} for i, word in enumerate(("bad", "good", "dire"))]
    (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "data"


def test_list_names_every_task_with_its_size(data: Path) -> None:
    from altup.data.tasks import TASKS

    plain = run.invoke(app, ["tasks", "list"]).output
    assert all(name in plain for name in TASKS)
    assert run.invoke(app, ["tasks"]).output == plain
    narrow = run.invoke(app, ["tasks"], env={"COLUMNS": "80"}).output
    assert all(metric in narrow for task in TASKS.values() for metric in task.metrics)
    assert "67,349" in plain
    counted = run.invoke(app, ["tasks", "list", "--data", str(data)]).output
    assert "3 of 872" in counted
    found = json.loads(run.invoke(app, ["tasks", "list", "--json", "--data", str(data)]).output)
    assert {t["name"]: t["found"] for t in found}["glue/sst2"] == {"validation": 3}
    assert {t["name"]: t["in_average"] for t in found}["glue/wnli"] is False


def test_show_prints_real_examples(data: Path) -> None:
    output = run.invoke(app, ["tasks", "show", "sst2", "--data", str(data), "-n", "2"]).output
    assert "sst2 sentence: it is bad" in output
    assert "positive" in output
    assert "dire" not in output
    assert "nyu-mll/glue" in run.invoke(app, ["tasks", "show", "sst2"]).output


def test_show_tells_which_lines_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"input": "a", "tar\n{"input": "b", "target": "c"}\n')
    result = run.invoke(app, ["tasks", "show", str(tmp_path / "own.jsonl")])
    assert result.exit_code == 0
    assert "skipped: 1 × broken JSON" in result.output


def test_show_explains_a_wrong_name_or_split(data: Path) -> None:
    for arguments, words in ((["sst3"], "sst2"), (["sst2", "--data", str(data), "--split", "test"], "validation")):
        error = run.invoke(app, ["tasks", "show", *arguments]).exception
        assert isinstance(error, UserError)
        assert words in str(error)


def test_evaluate_prints_saves_and_marks_partial_data(data: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "run" / "final")
    arguments = ["evaluate", str(tmp_path / "run"), "--task", "sst2", "--data", str(data)]
    result = run.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "validation 3 of 872" in result.output
    scores = json.loads((tmp_path / "run/evaluation/final/scores.json").read_text())
    assert scores["model"] == str(model)
    lines = (tmp_path / "run/evaluation/final/glue/sst2.validation.jsonl").read_text().splitlines()
    assert len(lines) == 3
    again = json.loads(run.invoke(app, [*arguments, "--json", "--limit", "2"]).stdout)
    assert again["tasks"][0]["examples"] == {"validation": 2}


def test_evaluate_finds_out_that_it_cannot_write_before_it_decodes(data: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not to be read")
    (tmp_path / "file").touch()
    for out, told in ((tmp_path / "file", "it is a file"), (tmp_path / "file/x", "Not a directory")):
        for more in ([], ["--predict-only", "--split", "validation"]):
            asked = ["evaluate", str(model), "--task", "sst2", "--data", str(data), "--out", str(out), *more]
            result = run.invoke(app, asked)
            assert isinstance(result.exception, UserError), result.exception
            assert "cannot be made" in str(result.exception)
            assert more or told in str(result.exception)


def test_evaluate_takes_a_users_own_file(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "sums.jsonl").write_text('{"input": "ab", "target": "c"}\n')
    arguments = ["evaluate", str(tmp_path / "model"), "--task", str(tmp_path / "sums.jsonl"), "--json"]
    found = json.loads(run.invoke(app, [*arguments, "--out", str(tmp_path / "out")]).stdout)
    assert found["tasks"][0]["task"] == "sums"
    assert (tmp_path / "out" / "sums.validation.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--task"),
        (["--suite", "blue"], "'glue'"),
        (["--task", "sst2", "--data", "nowhere"], "no folder"),
        (["--task", "sst2", "--batch-size", "0"], "--batch-size 0"),
        (["--task", "sst2", "--precision", "fp8"], "precision"),
    ],
)
def test_evaluate_explains_mistakes(arguments: list[str], words: str) -> None:
    error = run.invoke(app, ["evaluate", "model", *arguments]).exception
    assert isinstance(error, UserError)
    assert words in str(error)
