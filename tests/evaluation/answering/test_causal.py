"""Causal models answer as `generate` does for each prompt by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from altup.evaluation.answering import answering_of
from altup.evaluation.decoding import decode
from tests.evaluation.tiny import made_up_words
from tests.evaluation.tiny_models import save_decoder, save_gpt2, save_llama, save_wide

TEXTS = [" ".join(made_up_words()[i : i + 1 + 3 * i]) for i in range(5)]


@pytest.fixture(scope="module", params=["decoder", "llama", "wide llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    if request.param == "wide llama":
        return save_wide(root / "wide", save_llama(root / "llama"))
    makers: dict[str, Any] = {"decoder": save_decoder, "llama": save_llama, "gpt2": save_gpt2}
    return makers[request.param](root)


def test_answers_in_a_batch_are_those_of_each_prompt_alone(folder: Path) -> None:
    answering = answering_of(str(folder))
    model, tokenizer = answering.load().eval(), answering.tokenizer
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # of fresh weights all answers are alike
            parameter.mul_(1 + torch.randn_like(parameter))
    found = decode(model, answering, TEXTS, inputs_length=64, targets_length=8, batch_size=3)
    prompts = answering.inputs(TEXTS, 64)
    want = []
    for i in range(len(TEXTS)):
        ids = torch.from_numpy(prompts[i]).long()[None]
        written = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        want.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    assert found == want
    assert len(set(found)) > 1
