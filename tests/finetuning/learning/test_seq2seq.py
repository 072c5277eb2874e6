"""Encoders with decoders of transformers that are no T5s of ours: BART, T5's first version, and widened ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError
from altup.evaluation.config import EvaluateConfig
from altup.evaluation.evaluate import evaluate
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.finetune import finetune
from altup.finetuning.learning import learning_of
from altup.finetuning.learning.seq2seq import Seq2SeqRows
from altup.finetuning.packing import Sizes, Usual
from tests.evaluation.tiny import made_up_words
from tests.evaluation.tiny_models import made_when_asked, save_bart, save_t5, save_wide
from tests.training.compare import assert_same_run

SMALL: dict[str, Any] = {
    "steps": 60, "batch_size": 8, "optimizer": "adamw", "lr": 0.01, "eval_every": 60, "dropout": 0.0,
    "inputs_length": 48, "targets_length": 16, "deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by name, made when it is first asked for."""
    makers: dict[str, Callable[[Path], Path]] = {
        "bart": save_bart,
        "wide bart": lambda folder: save_wide(folder, find("bart")),
        "t5": save_t5,
        "t5 1.1": lambda folder: save_t5(folder, feed_forward_proj="gated-gelu"),
        "wide t5": lambda folder: save_wide(folder, find("t5 1.1")),
    }

    find = made_when_asked(makers, tmp_path_factory.mktemp("models"))
    return find


def config(model: Path, task: Path, **fields: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"model": str(model), "tasks": [str(task)], **SMALL, **fields})


@pytest.mark.parametrize("name", ["bart", "wide bart", "t5", "wide t5"])
def test_the_loss_is_that_of_transformers(folders: Any, name: str) -> None:
    """On the tokens that the model's own tokenizer makes of inputs and targets."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = folders(name)
    texts, answers = made_up_words()[:3], [" ".join(made_up_words()[i : i + 1 + i]) for i in range(3)]
    learning = learning_of(config(folder, Path("-")), str(folder))
    inputs, targets = learning.answering.inputs(texts, 48), learning.answering.targets(answers, 16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = tokenizer(texts, text_target=answers)
    assert [inputs[i].tolist() for i in range(3)] == theirs["input_ids"]
    assert [targets[i].tolist() for i in range(3)] == theirs["labels"]

    rows = Seq2SeqRows(Usual(Sizes(4, 1, 9), Sizes(4, 1, 9)), learning.pad, None)
    made = rows([inputs[i] for i in range(3)], [targets[i] for i in range(3)])
    batch = {name: torch.from_numpy(array).long() for name, array in made.items()}
    model: Any = learning.build(None).eval()
    model.z_loss = 0.0
    found = model(**batch)
    want = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()(**batch)
    torch.testing.assert_close(found.loss_sum / found.num_tokens, want.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bart", "wide t5"])
def test_a_task_is_learnt_by_heart_and_scored_again(folders: Any, task: Path, tmp_path: Path, name: str) -> None:
    outcome = finetune(config(folders(name), task), tmp_path / "run")
    assert outcome.evaluation is not None
    assert outcome.evaluation["pairs"] == 100, outcome.evaluation
    again = evaluate(str(tmp_path / "run"), [str(task)], config=EvaluateConfig(batch_size=3))
    assert [score.score for score in again.scores] == [100]


def test_stopped_and_resumed_it_is_the_same_run(folders: Any, task: Path, tmp_path: Path) -> None:
    short = {"steps": 4, "log_every": 1, "eval_every": 2, "dropout": 0.1, "keep_last": 1}
    finetune(config(folders("wide bart"), task, **short), tmp_path / "whole")
    finetune(config(folders("wide bart"), task, **{**short, "steps": 2}), tmp_path / "run")
    finetune(config(folders("wide bart"), task, **short), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 4)


def test_texts_that_are_longer_than_its_positions_are_refused(folders: Any, task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inputs_length=300 is more than the 256 positions"):
        finetune(config(folders("bart"), task, inputs_length=300), tmp_path / "run")
