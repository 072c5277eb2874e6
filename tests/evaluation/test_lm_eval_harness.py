"""lm-evaluation-harness takes our models as Hugging Face seq2seq models, and reads the right numbers from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.tiny import save_tiny

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (pip install 'lm_eval[hf]')")

TEXTS = ["sst2 sentence: abde kila", "sst2 sentence: " + "mono stari " * 9, "x"]
ANSWERS = ["positive", "negative", "ab"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def harness(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    import altup.models  # noqa: F401  registers our models with the Auto classes

    return HFLM(pretrained=str(folder), backend="seq2seq", device="cpu", batch_size=3)


def ask(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@torch.no_grad()
def test_likelihoods_are_the_models(harness: Any) -> None:
    """log p(answer | text), one text at a time, against a padded batch of the harness."""
    model, tokenizer = harness.model, harness.tokenizer
    assert type(model).__name__ == "AltUpT5ForConditionalGeneration"
    want = []
    for text, answer in zip(TEXTS, ANSWERS, strict=True):
        labels = tokenizer(answer, add_special_tokens=False, return_tensors="pt").input_ids
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids[0, -1] == tokenizer.eos_token_id
        scores = model(input_ids=ids, labels=labels).logits.log_softmax(-1)
        want.append(float(scores.gather(2, labels[..., None]).sum()))
    found = harness.loglikelihood([ask("loglikelihood", *pair) for pair in zip(TEXTS, ANSWERS, strict=True)])
    assert [score for score, _ in found] == pytest.approx(want, rel=1e-4)


def test_answers_are_the_greedy_ones(harness: Any) -> None:
    from altup.evaluation.answering.seq2seq import Seq2SeqAnswering
    from altup.evaluation.decoding import decode

    settings = {"until": [], "max_gen_toks": 7}
    found = harness.generate_until([ask("generate_until", text, dict(settings)) for text in TEXTS])
    longest = max(len(harness.tokenizer(text).input_ids) for text in TEXTS)
    limit = longest + 7 - 1  # the harness allows as many tokens more as the input has, the start token among them
    answering = Seq2SeqAnswering(harness.tokenizer)
    want = decode(harness.model, answering, TEXTS, inputs_length=128, targets_length=limit)
    assert [answer.strip() for answer in found] == want
    assert any(want)


@pytest.mark.slow
def test_the_documented_command(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": t, "answer": a}) + "\n" for t, a in zip(TEXTS, ANSWERS, strict=True))
    )
    task = {
        "task": "own", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": ANSWERS, "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    start = "import altup.models; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    model = ["--model", "hf", "--model_args", f"pretrained={folder},backend=seq2seq", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", start, *model, "--tasks", "own", "--include_path", str(tmp_path)],
        env={**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "|own" in done.stdout
