"""Encoders, ours and Hugging Face's: labels and scores learnt with a head of their own, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertModel

from altup.core.errors import UserError
from altup.data.tasks import find_task
from altup.data.tasks.task import Example
from altup.evaluation.config import EvaluateConfig
from altup.evaluation.evaluate import evaluate
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.finetune import finetune
from altup.finetuning.learning import learning_of
from altup.finetuning.packing import Sizes, Usual
from tests.evaluation.tiny import made_up_words
from tests.evaluation.tiny_models import made_when_asked, save_bert, save_our_bert, save_wide
from tests.training.compare import assert_same_run, weights

SMALL: dict[str, Any] = {
    "steps": 60, "batch_size": 8, "lr": 0.02, "log_every": 30, "eval_every": 60, "dropout": 0.0,
    "optimizer": "adafactor", "inputs_length": 48, "deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by name, made when it is first asked for."""

    def headless(folder: Path) -> Path:
        AutoTokenizer.from_pretrained(find("bert")).save_pretrained(folder)
        BertModel.from_pretrained(find("bert")).save_pretrained(folder)
        return folder

    makers: dict[str, Callable[[Path], Path]] = {
        "bert": lambda folder: save_bert(folder, initializer_range=0.2),  # what is pretrained tells tokens apart
        "headless": headless,
        "wide": lambda folder: save_wide(folder, find("bert")),
        "ours": save_our_bert,
    }

    find = made_when_asked(makers, tmp_path_factory.mktemp("models"))
    return find


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight sentences with labels or scores that have nothing to do with them."""
    root, words = tmp_path_factory.mktemp("data"), made_up_words()

    def write(name: str, lines: list[dict[str, Any]]) -> None:
        (root / "glue" / name).mkdir(parents=True)
        for split in ("train", "validation"):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (root / "glue" / name / f"{split}.jsonl").write_text(text)

    sentences = [" ".join(words[3 * i : 3 * i + 2 + i % 3]) for i in range(8)]
    labels = [1, 0, 0, 1, 1, 0, 1, 0]
    write("sst2", [{"sentence": s, "label": n} for s, n in zip(sentences, labels, strict=True)])
    write("cola", [{"sentence": s, "label": 1 - n} for s, n in zip(sentences, labels, strict=True)])
    scores = [{"sentence1": s, "sentence2": words[90], "label": 0.6 * i} for i, s in enumerate(sentences)]
    write("stsb", scores)
    return root


def config(model: Path, data: Path, *tasks: str, **fields: Any) -> FinetuneConfig:
    settings = {"model": str(model), "tasks": list(tasks or ("sst2",)), "data": str(data), **SMALL, **fields}
    return FinetuneConfig(**settings)


@pytest.mark.parametrize("name", ["bert", "headless", "wide", "ours"])
def test_the_loss_is_the_cross_entropy_of_each_example(folders: Any, data: Path, name: str) -> None:
    """And its gradient; padding does not count."""
    folder, task = folders(name), find_task("sst2")
    learning = learning_of(config(folder, data), str(folder))
    learning.prepare([task])
    examples = [Example(" ".join(made_up_words()[i : 2 * i + 1]), task.labels[i % 2], ()) for i in range(6)]
    inputs, targets, _ = learning.tokenise(task, examples)
    rows = [inputs[i] for i in range(6)]
    arrange = learning.rows(Usual(Sizes(9.0, 3.0, max(map(len, rows))), Sizes(1.0, 0.0, 1)), learning.pad, None)
    batch = {n: torch.from_numpy(a).long() for n, a in arrange(rows, [targets[i] for i in range(6)]).items()}
    torch.manual_seed(0)
    model: Any = learning.build(None).eval()
    model.z_loss = 0.0
    found = model(**batch)
    found.loss_sum.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain: Any = learning.to_score(model)
    texts = [torch.from_numpy(row).long()[None] for row in rows]
    alone = [plain(text, attention_mask=torch.ones_like(text)).logits for text in texts]
    want = sum(F.cross_entropy(one, torch.tensor([i % 2]), reduction="sum") for i, one in enumerate(alone))
    want.backward()  # type: ignore[union-attr]
    torch.testing.assert_close(found.loss_sum, want, rtol=1e-5, atol=1e-5)
    assert found.num_tokens == 6
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[n], p.grad, rtol=1e-3, atol=1e-5, msg=n)


@pytest.mark.parametrize("name", ["bert", "wide", "ours"])
def test_labels_are_learnt_by_heart_and_scored_again(folders: Any, data: Path, tmp_path: Path, name: str) -> None:
    """Two tasks that disagree about the same sentences share a head."""
    outcome = finetune(config(folders(name), data, "sst2", "cola"), tmp_path / "run")
    assert outcome.evaluation is not None
    assert outcome.evaluation["score"] == 100, outcome.evaluation
    again = evaluate(str(tmp_path / "run"), ["cola", "sst2"], config=EvaluateConfig(data=str(data), batch_size=3))
    assert [score.score for score in again.scores] == [100, 100]
    lines = (tmp_path / "run/evaluation/final/glue/sst2.validation.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["prediction"] == "positive"
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/final")
    assert list(saved.config.id2label.values()) == ["negative", "positive", "unacceptable", "acceptable"]
    assert "SequenceClassification" in (tmp_path / "run/README.md").read_text() or name == "wide"


def test_scores_are_learnt(folders: Any, data: Path, tmp_path: Path, capsys: Any) -> None:
    outcome = finetune(config(folders("bert"), data, "stsb"), tmp_path / "run")
    assert outcome.evaluation is not None
    assert outcome.evaluation["glue/stsb"] > 98, outcome.evaluation
    assert "an encoder reads one example a row: they are padded, not packed" in capsys.readouterr().err
    again = evaluate(str(tmp_path / "run"), ["stsb"], config=EvaluateConfig(data=str(data)))
    assert again.scores[0].score == outcome.evaluation["glue/stsb"]
    with pytest.raises(UserError, match="gives a score, and glue/sst2 asks for negative, positive"):
        evaluate(str(tmp_path / "run"), ["sst2"], config=EvaluateConfig(data=str(data)))


@pytest.mark.parametrize("name", ["wide", "ours"])
def test_stopped_and_resumed_it_is_the_same_run(folders: Any, data: Path, tmp_path: Path, name: str) -> None:
    short = {"steps": 4, "log_every": 1, "eval_every": 2, "dropout": 0.1, "keep_last": 1}
    finetune(config(folders(name), data, **short), tmp_path / "whole")
    finetune(config(folders(name), data, **{**short, "steps": 2}), tmp_path / "run")
    finetune(config(folders(name), data, **short), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 4)


def test_a_head_for_other_labels_is_replaced_and_the_body_kept(folders: Any, data: Path, tmp_path: Path) -> None:
    finetune(config(folders("bert"), data, steps=1, eval_every=1), tmp_path / "first")
    finetune(config(tmp_path / "first", data, "stsb", steps=1, eval_every=1, lr=1e-9), tmp_path / "second")
    before, after = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert after["classifier.weight"].shape == (1, 32)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-6)


def test_a_suite_is_its_tasks_that_are_in_the_data(folders: Any, data: Path, tmp_path: Path) -> None:
    """STS-B, which is not there, asks for no head; when another label comes, a run keeps the head that it has."""
    for name in ("sst2", "cola"):
        shutil.copytree(data / "glue" / name, tmp_path / "data" / "glue" / name)
    run = config(folders("bert"), tmp_path / "data", "glue", steps=1, eval_every=1)
    finetune(run, tmp_path / "run")
    names = AutoConfig.from_pretrained(tmp_path / "run" / "final").id2label.values()
    assert set(names) == {*find_task("sst2").labels, *find_task("cola").labels}
    rte = tmp_path / "data" / "glue" / "rte"
    rte.mkdir()
    (rte / "validation.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 0}\n')
    with pytest.raises(UserError, match="has other labels than the tasks of the data now"):
        finetune(replace(run, steps=2), tmp_path / "run", resume=True)


def test_what_an_encoder_cannot_do_is_refused(folders: Any, data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"input": "a", "target": "b"}\n')
    folder = folders("bert")
    for tasks, words in (
        ([str(tmp_path / "own.jsonl")], "own is answered with text, and an encoder names labels or a score"),
        (["sst2", "stsb"], "glue/stsb asks for a score and glue/sst2 for a label, and an encoder has one head"),
    ):
        with pytest.raises(UserError, match=words):
            finetune(config(folder, data, *tasks), tmp_path / "run")
    with pytest.raises(UserError, match="data='' is empty; give a folder"):
        finetune(replace(config(folder, data), data=""), tmp_path / "run")
    with pytest.raises(UserError, match="inputs_length=300 is more than the 256 positions"):
        finetune(config(folder, data, inputs_length=300), tmp_path / "run")
    with pytest.raises(UserError, match="is an encoder without a head for tasks; fine-tune it first"):
        evaluate(
            str(folder), ["sst2"], config=EvaluateConfig(data=str(data), inputs_length=48), out=tmp_path / "o"
        )
    assert not (tmp_path / "run").exists()


def test_a_damaged_body_is_not_taken_for_a_new_head(folders: Any, data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_bert(tmp_path / "bert")
    file = tmp_path / "bert/model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if n != "bert.encoder.layer.0.attention.self.query.weight"}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="is not whole: 1 weights are missing"):
        finetune(config(tmp_path / "bert", data), tmp_path / "run")
