"""The whole life of a Hugging Face model in our tools: widen, pretrain, fine-tune, evaluate and generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from altup.cli.main import app
from altup.core.errors import UserError
from tests.evaluation.tiny import made_up_text, made_up_words
from tests.evaluation.tiny_models import save_bert, save_llama, save_qwen

PREPARE = ("--validation-fraction", "0.2", "--workers", "1")
TRAIN = ("--steps", "2", "--batch-size", "4", "--inputs-length", "48", "--eval-every", "2", "--track", "none")


def altup(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, words = tmp_path_factory.mktemp("tasks"), made_up_words()
    (root / "glue/sst2").mkdir(parents=True)
    lines = [json.dumps({"sentence": " ".join(words[i : i + 3]), "label": i % 2}) + "\n" for i in range(8)]
    for split in ("train", "validation"):
        (root / f"glue/sst2/{split}.jsonl").write_text("".join(lines))
    return root


@pytest.mark.parametrize(
    ("save", "method", "prompt"),
    [(save_llama, "recycled", "dun"), (save_qwen, "altup", "dun"), (save_bert, "altup", "dun [MASK] mor")],
    ids=["llama", "qwen", "bert"],
)
def test_a_model_of_others_from_widening_to_answers(
    save: Callable[[Path], Path], method: str, prompt: str, tasks: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model")
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in made_up_text()[:200]))
    task = ("--task", "sst2", "--data", tasks)

    altup("widen", "model", "--method", method, "--out", "wide")
    altup("prepare", "text.jsonl", "--tokenizer", "wide", "--out", "data", *PREPARE)
    altup("pretrain", "--from", "wide", "--data", "data", "--out", "pretrained", *TRAIN)
    told = altup("finetune", "pretrained", *task, "--targets-length", "16", "--out", "tuned", *TRAIN)
    table = altup("evaluate", "tuned", *task)
    written = altup("generate", "tuned" if save is not save_bert else "pretrained", "--prompt", prompt)

    assert "adamw at 0.0001, coefficients at 0.001, " in told
    assert "glue/sst2" in table
    assert written.splitlines()[-1].startswith("dun")
    for run in ("pretrained", "tuned"):
        config = json.loads(Path(run, "final/config.json").read_text())
        assert config["altup"]["method"] == method
    if save is save_bert:
        with pytest.raises(UserError, match="holds a BertForSequenceClassification, which is no causal"):
            altup("generate", "tuned", "--prompt", prompt)
