"""Calls of accelerated models in a user's loop, replayed as CUDA graphs, against the same calls launched."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import altup
from tests.models.helpers import VOCABULARY, tiny, tiny_t5

pytestmark = pytest.mark.gpu


def batches(number, rows=(4,)):
    generator = torch.Generator().manual_seed(0)
    for i in range(number):
        ids, labels = (torch.randint(3, VOCABULARY, (rows[i % len(rows)], 16), generator=generator) for _ in "ab")
        yield {"input_ids": ids.cuda(), "labels": labels.cuda()}


def train(model, outer=True):
    """Steps of two micro-batches of two shapes, under autocast around the model, and losses that are kept."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for number, inputs in enumerate(batches(16, rows=(4, 6))):
        with torch.autocast("cuda", torch.bfloat16, enabled=outer):
            loss = model(**inputs).loss
        (loss / 2).backward()
        losses.append(loss.detach())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


def test_a_hand_written_loop_trains_as_launched():
    plain = tiny_t5("altup", dropout_rate=0.0).cuda().train()
    ours = altup.accelerate(copy.deepcopy(plain), compile=False)
    want, got = train(plain), train(ours)
    assert len(ours._compiled_call_impl._recorded) == 2
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert want[-1] < want[0]
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        # AdamW turns rounding of small gradients into steps: eight of 1e-3, in either direction.
        torch.testing.assert_close(other, one, rtol=0.05, atol=1.7e-2, msg=name)


def test_gradients_are_those_of_launched_calls_in_float32():
    """Two forward passes before their backward passes."""
    plain = tiny_t5("recycled", dropout_rate=0.0).cuda().train()
    ours = altup.accelerate(copy.deepcopy(plain), compile=False, record=True)
    for model in (plain, ours):
        for inputs in batches(4):
            model(**inputs).loss.backward()
        model.zero_grad()
        first, second = (model(**inputs).loss for inputs in batches(2))
        second.backward()
        (3 * first).backward()
    assert ours._compiled_call_impl._recorded
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-2, atol=1e-3, msg=name)


def test_dropout_draws_anew_in_every_replay():
    model = altup.accelerate(tiny_t5("altup", dropout_rate=0.3).cuda().train(), compile=False, record=True)
    (inputs,) = batches(1)
    losses = []
    for _ in range(8):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(float(loss))
    assert all(one != other for one, other in itertools.pairwise(losses))


@pytest.mark.parametrize("build", [lambda: tiny_t5("altup"), lambda: tiny("bert", "altup")], ids=["t5", "bert"])
def test_evaluation_is_replayed(build):
    model = build().cuda()
    ours = altup.accelerate(copy.deepcopy(model), compile=False, record=True)
    with torch.inference_mode():
        for inputs in batches(5):
            torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits, rtol=1e-3, atol=1e-3)
    assert ours._compiled_call_impl._recorded
