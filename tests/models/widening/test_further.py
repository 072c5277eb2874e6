"""A widened model made wider again."""

from __future__ import annotations

import copy

import pytest
import torch

from altup import load_widened, narrow, widen
from altup.core.errors import UserError
from tests.models.widening.families import build, inputs
from tests.models.widening.test_load_and_narrow import assert_same_weights, logits
from tests.models.widening.test_training import train


@pytest.mark.parametrize("method", ["recycled", "altup", "sameup"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "bert", "t5"])
def test_a_trained_model_grows_and_computes_the_same(family, method, tmp_path):
    model = widen(build(family), method, 2)
    train(model, 3)
    expected = logits(model)
    assert widen(model, method, 4) is model
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    train(model, 3)  # with rates at which every block moves, the copies part
    first = next(m for m in model.modules() if hasattr(m, "place"))
    assert first.altup.P.shape == (4, 4)
    assert not torch.equal(first.altup.P[:2, :2], first.altup.P[2:, 2:])
    model.save_pretrained(tmp_path)
    loaded = load_widened(tmp_path)
    assert_same_weights(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_grown_and_narrowed_it_is_the_original(method):
    model = build("llama")
    assert_same_weights(narrow(widen(widen(copy.deepcopy(model), method, 2), method, 6)), model)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    model = widen(build("llama"), "altup", 2)
    before, batch = copy.deepcopy(model), inputs(model)
    for options in ({"method": "altup", "num_blocks": 3}, {"num_blocks": 4}, {"method": "altup"}):
        with pytest.raises(UserError, match=r"widened already \(altup, K = 2\)"):
            widen(model, **options)
    with pytest.raises(UserError, match="and no more"):
        widen(model, "altup", 4, selection="same")
    assert_same_weights(model, before)
    assert model(**batch).logits.isfinite().all()
