"""Decoding against one text at a time, and what an evaluation leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError
from altup.data.bad_input import BadInput
from altup.data.tasks import find_task
from altup.data.tasks.examples import TaskFolder
from altup.evaluation.answering.seq2seq import Seq2SeqAnswering, read_answer
from altup.evaluation.decoding import decode
from altup.evaluation.evaluate import evaluate_tasks, load_held_out
from altup.evaluation.scores import summarise, write_scores
from tests.evaluation.tiny import made_up_words, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    model = AltUpT5ForConditionalGeneration.from_pretrained(folder)
    with torch.no_grad():  # a fresh model never ends its answers; this one ends some of them
        model.lm_head.weight[1] *= 3
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def greedy(model: Any, tokenizer: Any, text: str, inputs_length: int, targets_length: int) -> str:
    """One text, no padding, no cache: the whole answer is computed again for every token."""
    model.eval()
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"][: inputs_length - 1], 1]
    answer = [0]
    with torch.no_grad():
        for _ in range(targets_length):
            inputs = {"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([answer])}
            answer.append(int(model(**inputs).logits[0, -1].argmax()))
            if answer[-1] == 1:
                break
    return read_answer(tokenizer, answer[1:])


def texts() -> list[str]:
    words = made_up_words()
    return [" ".join(words[i : i + length]) for i, length in enumerate((3, 40, 1, 12, 70, 5, 2, 25, 9, 4, 33))]


def test_batches_decode_as_single_texts_do(model: Any, tokenizer: Any) -> None:
    seen: list[int] = []
    found = decode(
        *(model, Seq2SeqAnswering(tokenizer), texts()),
        inputs_length=100,
        targets_length=9,
        batch_size=4,
        progress=seen.append,
    )
    assert found == [greedy(model, tokenizer, text, 100, 9) for text in texts()]
    assert sum(seen) == len(texts())
    lengths = {len(tokenizer(answer)["input_ids"]) for answer in found}
    assert len(lengths) > 1, "answers that all end alike do not test the ending"


class Pair:
    """One of two processes; `all_reduce` needs what the other one computed."""

    def __init__(self, rank: int, other: torch.Tensor | None = None):
        self.rank, self.world_size, self.other, self.mine = rank, 2, other, torch.empty(0)

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        self.mine = numbers.clone()
        return numbers if self.other is None else numbers + self.other


def test_two_processes_share_the_batches(model: Any, tokenizer: Any) -> None:
    options: Any = {"inputs_length": 100, "targets_length": 5, "batch_size": 4}
    second = Pair(1)
    decode(model, Seq2SeqAnswering(tokenizer), texts(), peers=second, **options)
    first = Pair(0, second.mine)
    assert decode(model, Seq2SeqAnswering(tokenizer), texts(), peers=first, **options) == decode(
        model, Seq2SeqAnswering(tokenizer), texts(), **options
    )
    assert ((first.mine != 0).any(1) & (second.mine != 0).any(1)).sum() == 0


def test_training_goes_on_as_it_was(model: Any, tokenizer: Any) -> None:
    for training in (True, False):
        model.train(training)
        decode(model, Seq2SeqAnswering(tokenizer), ["ab"], inputs_length=10, targets_length=2)
        assert model.training is training
    model.eval()


def test_a_dense_hugging_face_t5_decodes_too(tokenizer: Any) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1, "decoder_start_token_id": 0}
    theirs = T5ForConditionalGeneration(T5Config(vocab_size=640, feed_forward_proj="gated-gelu", **shape))
    found = decode(theirs, Seq2SeqAnswering(tokenizer), texts()[:3], inputs_length=20, targets_length=4)
    assert found == [greedy(theirs, tokenizer, text, 20, 4) for text in texts()[:3]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, lines in {
        "glue/sst2": [{"sentence": "tart", "label": 1}, {"sentence": "Ünï\u2028", "label": 0}],
        "super_glue/wsc": [
            {"text": "A saw that he sat", "span1_text": "A", "span2_text": "he", "span2_index": 3, "label": 0}
        ],
    }.items():
        (tmp_path / name).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "validation.jsonl").write_text(text)
    return tmp_path


def test_predictions_and_scores_are_kept(model: Any, tokenizer: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    held_out = load_held_out([find_task("sst2"), find_task("wsc")], TaskFolder(data), BadInput("stop"))
    scores = evaluate_tasks(model, Seq2SeqAnswering(tokenizer), held_out, out, batch_size=2)
    lines = (out / "glue/sst2.validation.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["input"] for line in lines] == ["sst2 sentence: tart", "sst2 sentence: Ünï\u2028"]
    assert json.loads(lines[0])["prediction"] == greedy(model, tokenizer, "sst2 sentence: tart", 512, 84)
    summary = json.loads(write_scores(out, summarise(scores, "m")).read_text())
    assert [task["task"] for task in summary["tasks"]] == ["glue/sst2", "super_glue/wsc"]
    assert summary["tasks"][0]["missing"] == ["validation 2 of 872"]
    assert summary["tasks"][0]["partial"] is True
    assert not list(out.rglob("*.tmp"))


def test_a_task_without_held_out_data(data: Path) -> None:
    with pytest.raises(UserError, match="glue/cola: no validation"):
        load_held_out([find_task("cola")], TaskFolder(data), BadInput("stop"))
