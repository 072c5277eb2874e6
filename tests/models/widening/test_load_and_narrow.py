"""Widened models through disk, the original's weights back into them, and narrowing."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertModel,
    GPT2LMHeadModel,
)

from altup import load_widened, narrow, widen
from altup.core.errors import UserError
from tests.models.widening.families import FAMILIES, build, inputs
from tests.models.widening.test_training import train


def assert_same_weights(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def logits(model):
    with torch.no_grad():
        return model(**inputs(model)).logits


@pytest.mark.parametrize(("method", "num_blocks"), [("recycled", 2), ("altup", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, method, num_blocks, tmp_path):
    """After some training, so that nothing is where it started."""
    wide = widen(build(family), method, num_blocks)
    train(wide, 2)
    wide.save_pretrained(tmp_path)
    loaded = load_widened(tmp_path)
    assert type(loaded) is type(wide)
    assert not loaded.training
    assert_same_weights(loaded, wide)
    torch.testing.assert_close(logits(loaded), logits(wide))
    assert loaded.config.altup == wide.config.altup
    train(loaded, 1)


def test_round_trip_in_shards_and_half_precision(tmp_path):
    wide = widen(build("gpt2"), "altup").bfloat16()
    train(wide, 2)
    wide.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_widened(tmp_path)
    assert_same_weights(loaded, wide)
    assert loaded.dtype == torch.bfloat16
    assert loaded.transformer.h[0].altup.P.dtype == torch.float32
    assert load_widened(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("method", ["recycled", "altup", "sameup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_originals_state_loads_back(family, method):
    """Into a trained model, which then computes what the original does."""
    model = build(family)
    wide = widen(copy.deepcopy(model), method, 3)
    train(wide, 2)
    assert not torch.allclose(logits(wide), logits(model), atol=1e-3)
    result = wide.load_state_dict(model.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    torch.testing.assert_close(logits(wide), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_a_part_of_a_state_leaves_the_coefficients_as_trained(method):
    """Adapters, or a head, are loaded by themselves."""
    wide = widen(build("llama"), method)
    train(wide, 2)
    before, state = copy.deepcopy(wide), wide.state_dict()
    for names in (["model.layers.0.self_attn.q_proj.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        wide.load_state_dict({name: state[name] for name in names}, strict=False)
        assert_same_weights(wide, before)


def test_its_own_state_loads_back():
    wide, other = (widen(build("t5", seed=seed), "altup", 3) for seed in (0, 1))
    train(wide, 2)
    other.load_state_dict(wide.state_dict())
    assert_same_weights(other, wide)


@pytest.mark.parametrize("num_blocks", [2, 3, 7])
@pytest.mark.parametrize("method", ["recycled", "altup", "sameup"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_gives_the_original(family, method, num_blocks):
    """Bit for bit, with its class, its ties and its config, and ready to be widened again."""
    model = build(family)
    other = copy.deepcopy(model)
    assert narrow(widen(other, method, num_blocks)) is other
    assert_same_weights(other, model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert other.config.to_dict() == model.config.to_dict()
    assert other.all_tied_weights_keys == model.all_tied_weights_keys
    assert torch.equal(logits(other), logits(model))
    widen(other, method, num_blocks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_narrow_gives_half_precision_weights_bit_for_bit(family, num_blocks, dtype):
    """Small ones too: a half of 3·2⁻²⁴ is no float16."""
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.exp2(-22 * torch.rand_like(parameter)))
    model = model.to(dtype)
    before = copy.deepcopy(model)
    assert_same_weights(narrow(widen(model, "altup", num_blocks)), before)


def test_narrow_after_training_only_layers_and_head():
    """And the head: equal blocks that take equal steps are one block, however it is read."""
    wide = widen(build("llama"), "altup", 3)
    for name, parameter in wide.named_parameters():
        parameter.requires_grad = ".self_attn." in name or "lm_head" in name
    train(wide, 3)
    expected = logits(wide)
    torch.testing.assert_close(logits(narrow(wide)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        ("altup.g", "model.layers.0.altup has moved"),
        ("embed_tokens", "model.embed_tokens.weight: its blocks differ"),
        (".norm.", "model.norm.weight: its blocks differ"),
    ],
)
def test_narrow_refuses_what_was_trained_and_changes_nothing(trained, message):
    wide = widen(build("llama"), "altup", 3)
    for name, parameter in wide.named_parameters():
        parameter.requires_grad = trained in name
    train(wide, 2)
    before, expected = copy.deepcopy(wide), logits(wide)
    with pytest.raises(UserError, match=message):
        narrow(wide)
    assert_same_weights(wide, before)
    assert torch.equal(logits(wide), expected)


def test_narrow_refuses_a_head_trained_apart_from_its_table():
    wide = widen(build("gpt2"), "altup")
    with torch.no_grad():
        wide.lm_head.weight.mul_(2)
    with pytest.raises(UserError, match=r"lm_head.weight was tied to transformer.wte.weight"):
        narrow(wide)


def test_narrow_refuses_a_plain_model():
    with pytest.raises(UserError, match=r"not a model that altup.widen has widened"):
        narrow(build("llama"))


def test_saved_plan_is_readable(tmp_path):
    widen(build("llama"), "altup", 3).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "llama"
    assert saved["altup"] == {
        "method": "altup",
        "num_blocks": 3,
        "selection": "alternating",
        "seed": 0,
        "stacks": {"model.layers": False},
        "repeated": {"model.embed_tokens.weight": 1, "model.norm.weight": 0},
        "shared": {"lm_head.weight": 1},
        "untied": {},
    }


def test_load_errors(tmp_path):
    with pytest.raises(UserError, match="holds no model that can be read"):
        load_widened(tmp_path / "nothing")
    with pytest.raises(UserError, match="an Auto class is not needed"):
        load_widened(tmp_path / "nothing", model_class=AutoModelForCausalLM)  # type: ignore[arg-type]
    build("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="was not widened"):
        load_widened(tmp_path / "plain")
    wide = widen(build("llama"))
    wide.config.architectures = None
    weights = wide.state_dict()
    del weights["model.layers.2.altup.g"]
    wide.save_pretrained(tmp_path / "broken", state_dict=weights)
    with pytest.raises(UserError, match=r"not whole: 1 weights.*layers.2.altup.g"):
        load_widened(tmp_path / "broken")


@pytest.mark.parametrize("method", ["recycled", "altup"])
def test_another_head_on_a_trained_body(method, tmp_path):
    wide = widen(build("bert"), method, 3)
    train(wide, 2)
    wide.save_pretrained(tmp_path)
    batch = inputs(wide)
    del batch["labels"]
    with torch.no_grad():
        expected = wide.bert(**batch)[0]
        with pytest.warns(UserWarning, match=r"classifier.bias.* of BertForSequenceC.* start at random"):
            other = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
        assert torch.equal(other.bert(**batch)[0], expected)
        assert other(**batch).logits.shape == (3, 5)
        with pytest.warns(UserWarning, match="pooler"):
            body = load_widened(tmp_path, BertModel)
        assert torch.equal(body(**batch)[0], expected)
    train(other, 1)
    other.save_pretrained(tmp_path / "other")
    assert_same_weights(load_widened(tmp_path / "other"), other)


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_body_alone_and_its_head_again(family, method, tmp_path):
    """Qwen 3 has a head that was tied: it reads as the table does."""
    wide = widen(build(family), method)
    wide.save_pretrained(tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body = AutoModel.from_pretrained(tmp_path / "whole")
        body.save_pretrained(tmp_path / "body")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "body") if family == "qwen3" else None
    batch = inputs(wide)
    with torch.no_grad():
        assert torch.equal(body(batch["input_ids"])[0], wide.model(batch["input_ids"])[0])
    if again is not None:
        torch.testing.assert_close(logits(again), logits(wide), rtol=0, atol=1e-5)


def test_a_class_with_another_body_is_refused(tmp_path):
    widen(build("llama")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has none of the layers"):
        load_widened(tmp_path, GPT2LMHeadModel)


def test_damaged_folders_are_told_and_no_pickle_is_read(tmp_path):
    wide = widen(build("llama"), "altup")
    wide.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    plan = json.loads(config.read_text())

    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_widened(tmp_path)
    weights.unlink()
    torch.save(wide.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_widened(tmp_path)

    wide.save_pretrained(tmp_path)
    config.write_text(json.dumps({**plan, "altup": {**plan["altup"], "num_blocks": 3}}))
    with pytest.raises(UserError, match=r"is not whole: \d+ weights are missing or misshapen"):
        load_widened(tmp_path)
    config.write_text(json.dumps({**plan, "altup": {**plan["altup"], "later": 1}}))
    with pytest.raises(UserError, match=r"not of this altup version.*later"):
        load_widened(tmp_path)
    for damage, words in (
        ({"num_blocks": 100_000}, "num_blocks=100000"),
        ({"stacks": {"nothere": False}}, "does not fit the model"),
        ({"stacks": [1]}, "does not fit the model"),
    ):
        config.write_text(json.dumps({**plan, "altup": {**plan["altup"], **damage}}))
        with pytest.raises(UserError, match=words):
            load_widened(tmp_path)
