"""The fast greedy decoding against Hugging Face's own loop."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationMixin

from altup.models.t5 import generation
from tests.models.helpers import batch, tiny_t5

LIMITS = [2, 4, 5, 17, 30]


def hugging_face(model, inputs, **options):
    """Hugging Face's loop, which the model's own replaces for plain greedy decoding."""
    inherited = model.__class__._sample
    try:
        model.__class__._sample = GenerationMixin._sample
        return model.generate(**inputs, do_sample=False, **options)
    finally:
        model.__class__._sample = inherited


def decode(model, inputs, limit, eos, start=None):
    mask = inputs["attention_mask"]
    if start is None:
        start = torch.zeros(len(mask), 1, dtype=torch.long, device=mask.device)
    return generation.decode_greedily(
        model,
        start,
        limit=limit,
        eos=None if eos is None else torch.tensor(eos, device=mask.device),
        pad=0,
        encoder_outputs=model.encoder(**inputs),
        attention_mask=mask,
    )


def likely_ends(model, inputs):
    """Tokens that this untrained model produces at different places, to stand in for eos."""
    rows = hugging_face(model, inputs, max_new_tokens=20, eos_token_id=None)
    return rows[0, 3].item(), rows[1, 9].item()


@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sequence-altup", "average-pooling", "moe"])
def test_tokens_are_those_of_hugging_faces_loop(method):
    model = tiny_t5(method).eval()
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    for eos in ([1], list(likely_ends(model, inputs)), None):
        for limit in LIMITS:
            want = hugging_face(model, inputs, max_length=limit, eos_token_id=eos)
            got = decode(model, inputs, limit, eos)
            assert torch.equal(got, want), (eos, limit)


def test_goes_on_behind_given_tokens():
    model = tiny_t5("altup").eval()
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    start = torch.tensor([[0, 5, 9]] * len(inputs["input_ids"]))
    want = hugging_face(model, inputs, max_length=20, decoder_input_ids=start)
    assert torch.equal(decode(model, inputs, 20, [1], start), want)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sequence-altup", "moe"])
@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_steps_give_the_tokens_of_hugging_faces_loop(method, autocast):
    model = tiny_t5(method).eval().cuda()
    inputs = {name: tensor.cuda() for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        for eos in ([1], list(likely_ends(model, inputs)), None):
            for limit in LIMITS:
                want = hugging_face(model, inputs, max_length=limit, eos_token_id=eos)
                got = model.generate(**inputs, max_length=limit, eos_token_id=eos, do_sample=False)
                assert torch.equal(got, want), (eos, limit)
