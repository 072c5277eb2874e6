"""Causal models, ours and Hugging Face's: what they learn of a task, packed and padded, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from altup.core.errors import UserError
from altup.data.tasks import Example, Task
from altup.evaluation.config import EvaluateConfig
from altup.evaluation.evaluate import evaluate
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.finetune import finetune
from altup.finetuning.learning import learning_of
from altup.finetuning.learning.causal import CausalRows
from altup.finetuning.packing import Sizes, Usual
from tests.evaluation.tiny import made_up_words
from tests.evaluation.tiny_models import (
    byte_level,
    made_when_asked,
    save_bloom,
    save_decoder,
    save_gpt2,
    save_llama,
    save_qwen,
    save_wide,
)  # fmt: skip
from tests.training.compare import assert_same_run, records

TASK = Task("own", lambda record, training: [], ("exact_text",))
EXAMPLES = [Example(" ".join(made_up_words()[i : i + 1 + i % 5]), made_up_words()[50 + i], ()) for i in range(9)]
SMALL: dict[str, Any] = {
    "steps": 70, "batch_size": 8, "lr": 0.03, "log_every": 35, "eval_every": 70, "dropout": 0.0,
    "optimizer": "adafactor", "inputs_length": 48, "targets_length": 16, "deterministic": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by name, made when it is first asked for."""
    makers: dict[str, Callable[[Path], Path]] = {
        "decoder": save_decoder,
        "llama": save_llama,
        "wide llama": lambda folder: save_wide(folder, find("llama")),
        "qwen": save_qwen,
        "gpt2": save_gpt2,
        "bloom": save_bloom,
    }

    find = made_when_asked(makers, tmp_path_factory.mktemp("models"))
    return find


def config(model: Path, task: Path, **fields: Any) -> FinetuneConfig:
    return FinetuneConfig(**{"model": str(model), "tasks": [str(task)], **SMALL, **fields})


def rows_of(folder: Path, packing: str | None) -> tuple[Any, list[np.ndarray], dict[str, torch.Tensor]]:
    """The model in evaluation mode, whole texts one by one, and the same examples as a batch."""
    learning = learning_of(config(folder, Path("-")), str(folder))
    inputs, targets, cut = learning.tokenise(TASK, EXAMPLES)
    assert not any(cut.values())
    answering = learning.answering
    prompts = answering.inputs([e.input for e in EXAMPLES], 48)
    answers = answering.targets([e.target for e in EXAMPLES], 16)
    lengths = [len(inputs[i]) for i in range(9)]
    usual = Usual(Sizes(float(np.mean(lengths)), 3.0, max(lengths)), Sizes(1.0, 0.0, 16))
    arrange = CausalRows(usual, learning.pad, packing)
    batch = arrange([inputs[i] for i in range(9)], [targets[i] for i in range(9)])
    texts = [(prompts[i].tolist(), answers[i].tolist()) for i in range(9)]
    tensors = {name: torch.from_numpy(array).long() for name, array in batch.items()}
    return learning.build(None).eval(), texts, tensors  # type: ignore[return-value]


def by_hand(model: Any, texts: list[Any]) -> torch.Tensor:
    """Σ −log p(answer | prompt), one text after the other, with the logits alone."""
    total = torch.zeros(())
    for prompt, answer in texts:
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
        likelihood = F.log_softmax(logits.float(), dim=-1)
        for place, token in enumerate(answer):
            total = total - likelihood[len(prompt) + place - 1, token]
    return total


@pytest.mark.parametrize("name", ["decoder", "llama", "wide llama", "qwen", "gpt2"])
@pytest.mark.parametrize("packing", [None, "narrow"])
def test_the_loss_is_that_of_the_answers_alone(folders: Any, name: str, packing: str | None) -> None:
    """Also its gradient, however the examples are laid out."""
    model, texts, batch = rows_of(folders(name), packing)
    assert ("segments" in batch) == (packing is not None)
    assert (len(batch["input_ids"]) < 9) == (packing is not None)
    for setting in (getattr(model, "config", None), model):
        if hasattr(setting, "z_loss"):
            setting.z_loss = 0.0
    found = model(**batch).loss_sum
    found.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    want = by_hand(model, texts)
    want.backward()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)
    for n, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(gradients[n], p.grad, rtol=1e-3, atol=1e-4, msg=n)
    assert int((batch["shift_labels"] != -100).sum()) == sum(len(answer) for _, answer in texts)


def test_a_row_is_start_input_question_answer_and_end(folders: Any) -> None:
    for name, start in (("decoder", "</s>"), ("llama", "<s>"), ("qwen", "<|endoftext|>")):
        folder = folders(name)
        learning = learning_of(config(folder, Path("-")), str(folder))
        tokenizer = learning.answering.tokenizer
        inputs, targets, _ = learning.tokenise(TASK, [Example("it is so", "yes indeed", ())])
        read, learnt = inputs[0].tolist(), [token for token in targets[0].tolist() if token != -100]
        assert read[0] == tokenizer.convert_tokens_to_ids(start)
        said = " ".join(tokenizer.decode(read[1:]).split())
        assert said == "it is so answer: yes indeed", name
        assert learnt == [*read[-len(learnt) + 1 :], tokenizer.eos_token_id]
        assert tokenizer.decode(learnt[:-1]).strip() == "yes indeed"


def test_what_is_cut_is_the_input_and_not_the_question(folders: Any) -> None:
    folder = folders("qwen")
    learning = learning_of(config(folder, Path("-"), inputs_length=20), str(folder))
    words = " ".join(made_up_words())
    inputs, _, cut = learning.tokenise(TASK, [Example(words, "yes", ()), Example("a", words, ())])
    assert cut == {"inputs": 1, "targets": 1}
    assert learning.answering.tokenizer.decode(inputs[0]).endswith("\nanswer: yes")
    assert len(inputs[1]) < 20 + 16


def test_models_that_mix_packed_texts_are_padded(folders: Any, task: Path, tmp_path: Path, capsys: Any) -> None:
    finetune(config(folders("bloom"), task, steps=1, eval_every=1), tmp_path / "run")
    told = capsys.readouterr().err
    assert "BloomForCausalLM does not tell the examples of a packed row apart: they are padded, not packed" in told
    assert "pack: false" in (tmp_path / "run/config.yaml").read_text()


@pytest.mark.parametrize("name", ["decoder", "llama", "wide llama"])
def test_a_task_is_learnt_by_heart_and_scored_again(folders: Any, task: Path, tmp_path: Path, name: str) -> None:
    outcome = finetune(config(folders(name), task), tmp_path / "run")
    assert outcome.evaluation is not None
    assert outcome.evaluation["pairs"] == 100, outcome.evaluation
    again = evaluate(str(tmp_path / "run"), [str(task)], config=EvaluateConfig(batch_size=3))
    assert [score.score for score in again.scores] == [100]
    assert "pack: true" in (tmp_path / "run/config.yaml").read_text()
    card = (tmp_path / "run/README.md").read_text()
    assert ("load_widened" in card) == (name == "wide llama")
    assert "AutoModelForCausalLM" in card or name == "wide llama"


@pytest.mark.parametrize("name", ["decoder", "wide llama"])
def test_stopped_and_resumed_it_is_the_same_run(folders: Any, task: Path, tmp_path: Path, name: str) -> None:
    short = {"steps": 4, "log_every": 1, "eval_every": 2, "dropout": 0.1, "keep_last": 1}
    finetune(config(folders(name), task, **short), tmp_path / "whole")
    finetune(config(folders(name), task, **{**short, "steps": 2}), tmp_path / "run")
    finetune(config(folders(name), task, **short), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 4)
    assert [r["step"] for r in records(tmp_path / "run") if r["split"] == "validation"] == [2, 4]


def test_rows_longer_than_the_model_s_positions_are_refused(folders: Any, task: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"inputs_length \+ targets_length=416 is more than the 256 positions"):
        finetune(config(folders("llama"), task, inputs_length=400), tmp_path / "run")
    with pytest.raises(UserError, match="inputs_length=4 leaves no room"):
        finetune(config(folders("llama"), task, inputs_length=4), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_must_be_there_and_know_an_end(folders: Any, task: Path, tmp_path: Path) -> None:
    folder = save_qwen(tmp_path / "qwen")
    endless = byte_level(folder)
    endless.eos_token = None
    endless.save_pretrained(folder)
    with pytest.raises(UserError, match="has no eos_token, which ends an answer"):
        finetune(config(folder, task), tmp_path / "run")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="has no tokenizer; save it beside the model"):
        finetune(config(folder, task), tmp_path / "run")
