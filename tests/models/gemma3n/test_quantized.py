"""Weights in four and eight bits (bitsandbytes, torchao): QLoRA of Gemma 3n trains, and its kernels stay."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Gemma3nForCausalLM, Gemma3nForConditionalGeneration, Gemma3nTextConfig

import altup
from altup.core.errors import UserError
from altup.models.gemma3n import small_maps
from tests.models.gemma3n.test_recipes import ALL, adapted, called, kinds
from tests.models.gemma3n.tiny import (
    accelerated,
    assert_same,
    batch,
    distance,
    image_batch,
    tiny_gemma,
    tiny_multimodal,
)

__all__ = ["called"]  # a fixture

FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(params=["text", "image"])
def folder(request, monkeypatch, tmp_path):
    """Saved models of both kinds, wide enough to be quantized by blocks of 64 weights, and data."""
    if request.param == "text":
        tiny_gemma(layers=2, hidden_size=64, head_dim=32).save_pretrained(tmp_path)
        return Gemma3nForCausalLM, tmp_path, batch(2, 9)
    tiny_multimodal(monkeypatch, hidden_size=64, head_dim=32).save_pretrained(tmp_path)
    return Gemma3nForConditionalGeneration, tmp_path, image_batch()


def load(folder, **options):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    cls, path, data = folder
    model = cls.from_pretrained(path, quantization_config=BitsAndBytesConfig(**options), device_map="cpu")
    return model.train(), data


def altups(model):
    return [part for part in model.modules() if type(part).__name__ == "Gemma3nTextAltUp"]


def test_qlora_with_the_names_to_skip(folder, called):
    """The original trains too, and so it can be compared with."""
    model, data = load(folder, **FOUR, llm_int8_skip_modules=altup.skip_modules(folder[1]))
    assert type(altups(model)[0].modality_router) is torch.nn.Linear
    model = adapted(model, "all-linear")
    assert_same(model, accelerated(model), data, tolerance=3e-5)
    assert kinds(called) == ALL


def with_dequantized_maps(model):
    """The original with AltUp's own maps as they are below the quantization: it fails in training without."""
    for part in altups(model):
        for name in small_maps.SMALL:
            weight = small_maps.base_weight(getattr(part, name))
            assert getattr(part, name).weight.dtype in (torch.uint8, torch.int8)
            plain = torch.nn.Linear(*reversed(weight.shape), bias=False)
            plain.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            setattr(part, name, plain)
    return model


def test_small_maps_in_four_bits_are_dequantized_once(folder, called):
    model, data = load(folder, **FOUR)
    ours = accelerated(adapted(copy.deepcopy(model), ["q_proj"]))
    assert_same(adapted(with_dequantized_maps(model), ["q_proj"]), ours, data, tolerance=3e-5)
    assert kinds(called) == ALL
    first = altups(ours)[0].modality_router
    assert small_maps.base_weight(first) is small_maps.base_weight(first)


def test_eight_bits(folder, called):
    model, data = load(folder, load_in_8bit=True)
    ours = accelerated(model.eval())
    with torch.no_grad():
        got, want = ours(**data).logits, with_dequantized_maps(model)(**data).logits
    assert distance(got, want) < 1e-2  # the other maps round their inputs to eight bits, and one rounds otherwise
    assert called["predict"]
    assert called["correct"]


def test_torchao(called):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_gemma(layers=2).eval()
    quantization.quantize_(
        model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda part, name: name.endswith(small_maps.SMALL)
    )
    assert type(altups(model)[0].modality_router.weight).__module__.startswith("torchao")
    ours = accelerated(model)
    with torch.no_grad():
        assert distance(ours(**batch()).logits, model(**batch()).logits) < 1e-4
    assert called["predict"]


def test_what_has_nothing_to_skip_is_refused(tmp_path):
    tiny_gemma(layers=2).save_pretrained(tmp_path)
    names = altup.skip_modules(Gemma3nTextConfig())
    assert names == altup.skip_modules(str(tmp_path)) == altup.skip_modules(tiny_gemma(layers=2))
    assert set(small_maps.SMALL) < set(names)
    with pytest.raises(UserError, match="not Linear"):
        altup.skip_modules(torch.nn.Linear(2, 2))
