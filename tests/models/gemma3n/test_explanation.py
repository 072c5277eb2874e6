"""`altup.explain`: what parts run on, and why, as the calls of kernels show it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import altup
from altup.core import errors
from tests.models.gemma3n.test_recipes import ALL, adapted, called, kinds
from tests.models.gemma3n.tiny import accelerated, batch, tiny_gemma
from tests.models.helpers import tiny

__all__ = ["called"]  # a fixture


def facts(model):
    return {name: {row["runs"] for row in rows} for name, rows in altup.explain(model).as_dict().items()}


def test_every_kind_of_part_is_named(called):
    model = tiny_gemma(layers=2)
    before = facts(model)
    assert set().union(*before.values()) == {"original", "eager", "launched"}
    ours = accelerated(model)
    ours(**batch(2, 9))
    assert kinds(called) == ALL
    after = facts(ours)
    assert after.keys() == before.keys()
    assert after.pop("generate as CUDA graphs") == {"original"}  # of which there are none on a CPU
    assert set().union(*after.values()) == {"plain", "eager", "launched"}
    assert facts(altup.accelerate(ours, implementation="plain", record=True))["calls"] == {"recorded"}
    counts = {name: rows[0]["count"] for name, rows in altup.explain(ours).as_dict().items()}
    assert counts["AltUp (predict, correct)"] == counts["layers"] == 2


def test_reasons():
    model = tiny_gemma(layers=2, attention_dropout=0.1)
    model.model.layers[0].laurel.post_laurel_norm.register_forward_hook(lambda *given: None)
    model.lm_head = nn.Linear(16, 40)
    model.gradient_checkpointing_enable()
    errors.WARNED.clear()
    with pytest.warns(UserWarning, match="the original code runs for .*, and .* more; altup.explain"):
        ours = accelerated(model, record=True)
    found = altup.explain(ours).as_dict()
    assert found["additions with norms"] == [
        {"count": 1, "runs": "original", "why": "post_laurel_norm: another module, or a hook"},
        {"count": 1, "runs": "plain", "why": ""},
    ]
    assert found["loss without logits"][0]["why"] == "lm_head: an adapter, a hook or a bias"
    assert found["padded and packed rows"][0]["why"] == "attention has dropout (0.1)"
    assert found["calls"] == [{"count": 1, "runs": "launched", "why": "a module has hooks"}]
    table = str(altup.explain(ours)).splitlines()
    assert table[0].split() == ["part", "runs", "why"]
    assert "post_laurel_norm" in "\n".join(table)


def test_an_adapter_that_cannot_be_folded_is_named(called):
    pytest.importorskip("peft")
    model = adapted(tiny_gemma(layers=2), ["modality_router"], lora_dropout=0.1)
    errors.WARNED.clear()
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.1"):
        altup.accelerate(model, implementation="plain")
    model(**batch())
    assert not called["predict"]
    assert called["residual"]
    row = altup.explain(model).as_dict()["AltUp (predict, correct)"][0]
    assert row["runs"] == "original"
    assert row["why"] == "modality_router: its adapter has dropout (lora_dropout=0.1)"
    model.eval()  # where there is no dropout
    assert facts(model)["AltUp (predict, correct)"] == {"plain"}
    with torch.no_grad():
        model(**batch())
    assert called["predict"]


def test_where_nothing_falls_back_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerated(tiny_gemma(layers=2))


def test_on_a_cpu_the_reason_is_the_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = accelerated(tiny_gemma(layers=2), "auto")
    found = altup.explain(ours).as_dict()
    assert found["AltUp (predict, correct)"] == [
        {"count": 2, "runs": "original", "why": "no GPU that Triton supports (cpu)"}
    ]
    assert {row["runs"] for name, rows in found.items() if name not in ("layers", "calls") for row in rows} == {
        "original"
    }


def test_other_models():
    assert facts(tiny("decoder", "altup")) == {"layers": {"eager"}, "calls": {"launched"}}
    model = altup.accelerate(tiny("decoder", "altup"), compile=True, record=True)
    assert facts(model) == {"layers": {"compiled"}, "calls": {"recorded"}}
    with pytest.raises(errors.UserError, match="nothing to explain"):
        altup.explain(nn.Linear(2, 2))
    with pytest.raises(errors.UserError, match=r"altup\.explain takes a model"):
        altup.explain(None)
