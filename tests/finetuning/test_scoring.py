"""The copy that a run is scored with says what the trained model says, and leaves it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from altup.evaluation.decoding import round_weights
from altup.finetuning.scoring import model_to_score
from tests.models.helpers import tiny_t5


def say(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and what is decoded, under bf16 autocast."""
    ids = torch.arange(6, 46).view(4, 10)
    model.eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, decoder_input_ids=ids).logits, model.generate(input_ids=ids, max_new_tokens=9)


@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sum", "moe", "sequence-altup"])
def test_rounding_once_gives_the_same_bits(method: str) -> None:
    """Autocast rounds the weights of linear maps in every call: to round them before changes nothing."""
    model = tiny_t5(method, vocab_size=100).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy = model_to_score(model, low_precision=True)
    assert not copy.training
    assert {m.weight.dtype for m in copy.modules() if isinstance(m, nn.Linear)} == {torch.bfloat16}
    assert {m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear)} == {torch.float32}
    for ours, theirs in zip(say(copy), say(model), strict=True):
        assert torch.equal(ours, theirs)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_tied_table_keeps_its_precision() -> None:
    model = tiny_t5("dense", vocab_size=100, tie_word_embeddings=True)
    want = say(model)
    copy = model_to_score(model, low_precision=True)
    assert copy.get_input_embeddings().weight.dtype == torch.float32
    for ours, theirs in zip(say(copy), want, strict=True):
        assert torch.equal(ours, theirs)


def test_a_hugging_face_t5_says_the_same_when_rounded() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    shape: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "decoder_start_token_id": 0}
    theirs = T5ForConditionalGeneration(T5Config(vocab_size=100, feed_forward_proj="gated-gelu", **shape))
    want = say(theirs)
    round_weights(theirs, torch.bfloat16)
    for ours, before in zip(say(theirs), want, strict=True):
        assert torch.equal(ours, before)


def test_in_float32_the_model_scores_itself() -> None:
    model = tiny_t5("altup")
    assert model_to_score(model, low_precision=False) is model
