"""What a fine-tuning run measures, keeps and says is what `altup evaluate` finds in its folder."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from altup.data.tasks import TASKS
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.finetune import finetune
from altup.training.checkpoints import read_state
from tests.evaluation.tiny import made_up_words, save_tiny
from tests.training.compare import records

WORDS = made_up_words()


@pytest.fixture(autouse=True)
def _same_registry() -> Iterator[None]:
    """Tasks that a test registers are gone behind it."""
    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)


def write_task(folder: Path, examples: list[tuple[str, str]], held_out: int = 8) -> Path:
    folder.mkdir(parents=True)
    for split, chosen in (("train", examples), ("validation", examples[:held_out])):
        lines = [json.dumps({"input": text, "target": target}) + "\n" for text, target in chosen]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def first_word(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first word is the answer, and a hundred others follow."""
    draw = random.Random(0)
    answers = [draw.choice(WORDS[:2]) for _ in range(32)]
    return write_task(
        tmp_path_factory.mktemp("tasks") / "first",
        [(" ".join([answer, *draw.choices(WORDS, k=100)]), answer) for answer in answers],
    )


def config(model: Path, task: Path, **fields: Any) -> FinetuneConfig:
    usual: dict[str, Any] = {"steps": 40, "batch_size": 16, "lr": 0.02, "dropout": 0.0, "eval_every": 20}
    usual |= {"inputs_length": 20, "targets_length": 9, "trackers": []}
    return FinetuneConfig(**{"model": str(model), "tasks": [str(task)], **usual, **fields})


@pytest.fixture(scope="module")
def short(model: Path, first_word: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reads six tokens of each input."""
    out = tmp_path_factory.mktemp("runs") / "short"
    finetune(config(model, first_word, inputs_length=6, targets_length=9), out)
    return out


def evaluate(model: Path, task: Path, out: Path, *flags: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["evaluate", str(model), "--task", str(task), "--out", str(out), *flags])
    assert result.exit_code == 0, result.output
    return json.loads((out / "scores.json").read_text())["tasks"][0]


def test_lengths_travel_with_the_run(short: Path, first_word: Path, tmp_path: Path) -> None:
    trained = [r for r in records(short) if r["split"] == "validation"][-1]["first"]
    for name, place in (("run", short), ("final", short / "final"), ("step", short / "checkpoints/step-40")):
        found = evaluate(place, first_word, tmp_path / name)
        assert found["lengths"] == {"inputs": 6, "targets": 9}
        assert found["score"] == trained
        assert found["cut"] == {"inputs": 8, "targets": 0}
    found = evaluate(short, first_word, tmp_path / "longer", "--inputs-length", "50", "--targets-length", "7")
    assert found["lengths"] == {"inputs": 50, "targets": 7}


def test_what_was_cut_is_told(short: Path, model: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "long[red]", [(" ".join(WORDS), " ".join(WORDS[:50]))] * 3)
    arguments = ["evaluate", str(short), "--task", str(task), "--out", str(tmp_path / "out")]
    text = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).output.split())
    assert "long[red]: 3 of 3 inputs exceed 6 tokens and were cut" in text
    assert "long[red]: 3 of 3 targets exceed 9 tokens and were cut" in text


def test_own_tasks_may_be_as_long_as_they_like(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path / "long", [(" ".join(WORDS * 2), " ".join(WORDS[:80]))] * 2)
    enough = {"inputs_length": 2000, "targets_length": 400, "steps": 1, "batch_size": 2, "eval_every": 1}
    finetune(config(model, task, **enough), tmp_path / "run")
    assert "cut" not in capsys.readouterr().err
    scores = json.loads((tmp_path / "run/evaluation/step-1/scores.json").read_text())
    assert scores["tasks"][0]["cut"] == {"inputs": 0, "targets": 0}


def test_the_best_are_kept_with_the_defaults(short: Path) -> None:
    state = read_state(short / "checkpoints" / "step-40")
    best = state.best["step"]
    assert (short / "checkpoints" / f"step-{best}").is_dir()
    assert f"| {best} | step-{best} |" in (short / "README.md").read_text()


def test_steps_that_are_not_saved_cannot_be_kept(
    model: Path, first_word: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(config(model, first_word, steps=8, eval_every=2, save_every=7), tmp_path / "run")
    assert "only steps that are both measured and saved" in capsys.readouterr().err


def test_another_yardstick_forgets_the_best(
    model: Path, first_word: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, settings = tmp_path / "run", {"steps": 4, "eval_every": 4, "lr": 1e-6}
    finetune(config(model, first_word, eval_limit=1, **settings), out)
    state = read_state(out / "checkpoints" / "step-4")
    again = {**settings, "steps": 8, "lr": 1e-6}
    finetune(config(model, first_word, eval_limit=1, **again), out, resume=True)
    assert "have changed" not in capsys.readouterr().err
    assert read_state(out / "checkpoints" / "step-8").best == state.best  # not beaten
    finetune(config(model, first_word, eval_limit=5, **{**again, "steps": 12}), out, resume=True)
    assert "the best so far do not count any more" in capsys.readouterr().err
    assert read_state(out / "checkpoints" / "step-12").best["step"] == 12


@pytest.mark.parametrize("part", ["final", "checkpoints/step-40"])
def test_damaged_weights_are_refused(short: Path, first_word: Path, tmp_path: Path, part: str) -> None:
    run = shutil.copytree(short, tmp_path / "run")
    file = run / part / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    out = ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["evaluate", str(run / part), "--task", str(first_word), *out])
    assert isinstance(result.exception, UserError)
    assert "model.safetensors have changed" in str(result.exception)
    with pytest.raises(UserError, match="is damaged"):
        finetune(config(run / part, first_word), tmp_path / "again")
    (run / part / "SHA256SUMS.json").unlink()
    evaluate(run / part, first_word, tmp_path / "out")


def test_a_tokenizer_that_is_too_large_is_refused_before_decoding(first_word: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "small", rows=100)
    out = ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["evaluate", str(model), "--task", str(first_word), *out])
    assert isinstance(result.exception, UserError)
    assert "100 rows" in str(result.exception)


@pytest.mark.parametrize("names", [["glue=1", "sst2=5"], ["sst2=5", "glue=1"], ["sst2=2", "sst2=5"]])
def test_a_weight_must_be_clear(model: Path, tmp_path: Path, names: list[str]) -> None:
    for task in ("sst2", "cola"):
        folder = tmp_path / "glue" / task
        folder.mkdir(parents=True)
        for split in ("train", "validation"):
            (folder / f"{split}.jsonl").write_text('{"sentence": "a", "label": 0}\n' * 4)
    with pytest.raises(UserError, match=r"glue/sst2 is named twice"):
        finetune(FinetuneConfig(model=str(model), tasks=names, data=str(tmp_path)), tmp_path / "run")


NEWS = """
from altup.data.tasks import Example, Task, register

def write(record, training):
    return [Example(f"news title: {record['title']}", record["topic"], references=(record["topic"],))]

register(Task(name="%s", write=write, metrics=("%s",), labels=("sport", "money", "art"), folder="news"))
"""


def write_news(folder: Path, bad: str = "") -> Path:
    (folder / "news").mkdir(parents=True)
    line = json.dumps({"title": "it rains", "topic": "sport"}) + "\n"
    for split in ("train", "validation"):
        (folder / "news" / f"{split}.jsonl").write_text(line * 4 + bad)
    return folder


def test_a_python_file_adds_a_task(model: Path, tmp_path: Path) -> None:
    """From the command line, with what its own writer does not look for told by file and line."""
    file = tmp_path / "my_tasks.py"
    file.write_text(NEWS % ("news", "accuracy") + NEWS % ("other", "accuracy"))
    data = write_news(tmp_path / "data")
    shown = CliRunner().invoke(app, ["tasks", "show", f"{file}:news", "--data", str(data)])
    assert "news title: it rains" in shown.output
    flags = ["--task", f"{file}:news", "--data", str(data), "--steps", "2", "--batch-size", "2", "--track", "none"]
    done = CliRunner().invoke(app, ["finetune", str(model), *flags, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert [r["news"] for r in records(tmp_path / "run") if r["split"] == "validation"]
    for name, line, words in (
        ("lost", '{"topic": "sport"}', "KeyError: 'title'"),
        ("odd", '{"title": "a", "topic": "weather"}', "'weather'; known are sport, money, art"),
    ):
        bad = write_news(tmp_path / name, line + "\n")
        settings = {"data": str(bad), "steps": 2, "batch_size": 2}
        with pytest.raises(UserError, match=r"train\.jsonl") as stopped:
            finetune(config(model, Path(f"{file}:news"), **settings), tmp_path / f"{name}-run")
        assert words in str(stopped.value)
        finetune(config(model, Path(f"{file}:news"), on_error="skip", **settings), tmp_path / f"{name}-run")


@pytest.mark.parametrize(
    ("name", "metric", "asked", "words"),
    [
        ("unknown_metric", "acc", "", "'acc' is not known"),
        ("three_labels", "f1", "", "exactly 2 labels, and it has 3"),
        ("step", "accuracy", "", "cannot be called 'step'"),
        ("named", "accuracy", ":another", "no 'another'"),
    ],
)
def test_a_task_that_cannot_work_is_told_before_training(
    model: Path, tmp_path: Path, name: str, metric: str, asked: str, words: str
) -> None:
    file = tmp_path / "my_tasks.py"
    file.write_text(NEWS % (name, metric))
    with pytest.raises(UserError, match=words):
        finetune(config(model, Path(f"{file}{asked}"), data=str(write_news(tmp_path / "data"))), tmp_path / "run")
    assert not (tmp_path / "run").exists()
