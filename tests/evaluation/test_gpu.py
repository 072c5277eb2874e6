"""Decoding on a CUDA GPU: the words of a copy with rounded weights, and the time a large task takes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.evaluation.answering.seq2seq import Seq2SeqAnswering
from altup.evaluation.decoding import decode, round_weights
from tests.evaluation.tiny import made_up_words, save_tiny

pytestmark = pytest.mark.gpu

QUESTIONS, LONGEST_ANSWER = 10_570, 97  # of SQuAD's validation split


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return AutoTokenizer.from_pretrained(save_tiny(tmp_path / "tiny"))


def build(size: str, method: str, **fields: Any) -> Any:
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    torch.manual_seed(0)
    with torch.device("cuda"):
        return AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset(size, method, **fields)).eval()


def texts(number: int) -> list[str]:
    """As long as SQuAD's inputs: a mean of about 205 tokens, and some beyond 512."""
    draw, words = random.Random(0), made_up_words()
    return [" ".join(draw.choices(words, k=int(draw.lognormvariate(4.35, 0.4)))) for _ in range(number)]


def bf16() -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("method", ["dense", "altup"])
def test_decoding_is_repeatable(tokenizer: Any, method: str) -> None:
    model = build("small", method, vocab_size=len(tokenizer))
    settings: Any = {"inputs_length": 512, "targets_length": 20, "batch_size": 32, "autocast": bf16}
    found = [decode(model, Seq2SeqAnswering(tokenizer), texts(64), **settings) for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@pytest.mark.parametrize("method", ["dense", "altup"])
def test_rounded_weights_give_the_same_logits(tokenizer: Any, method: str) -> None:
    """Bit for bit where cuBLAS takes the same way for both; else within a rounding of a logit to bf16."""
    model = build("small", method, vocab_size=len(tokenizer))
    inputs = torch.randint(3, len(tokenizer), (32, 200), device="cuda")

    def logits() -> torch.Tensor:
        with torch.no_grad(), bf16():
            return model(input_ids=inputs, decoder_input_ids=inputs[:, :20]).logits.float()

    before = logits()
    round_weights(model, torch.bfloat16)
    after = logits()
    print(f"{method}: {(before != after).double().mean():.2%} of the logits differ")
    torch.testing.assert_close(after, before, rtol=2**-7, atol=2**-7 * before.std().item())


def test_a_base_model_answers_all_of_squad_in_three_minutes(tokenizer: Any) -> None:
    """Fresh weights never end an answer, so that every one is as long as it may be."""
    model = build("base", "altup")
    round_weights(model, torch.bfloat16)
    settings: Any = {"inputs_length": 512, "targets_length": LONGEST_ANSWER, "autocast": bf16}
    decode(model, Seq2SeqAnswering(tokenizer), texts(128), **settings)
    begin = time.perf_counter()
    found = decode(model, Seq2SeqAnswering(tokenizer), texts(QUESTIONS), **settings)
    seconds = time.perf_counter() - begin
    print(f"{len(found):,} answers in {seconds:.1f} s")
    assert len(found) == QUESTIONS
    assert seconds < 180
