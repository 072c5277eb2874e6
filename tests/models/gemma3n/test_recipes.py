"""What people train with: autocast, padded and packed rows, LoRA, four bits. Which kernels are called, and whether
the numbers are the original's, for the text model and for the one with an image."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from altup.kernels import gemma3n as fused
from altup.models.gemma3n import classes, head, text_model
from tests.models.gemma3n.tiny import (
    accelerated,
    assert_same,
    batch,
    distance,
    gradients,
    image_batch,
    tiny_gemma,
    tiny_multimodal,
)

PARTS = ("predict", "correction", "correct", "gated", "norm_beside", "residual", "norm_rotary", "causal_attention")
ALL = {*PARTS, "match_magnitudes", "head_sums"}


@pytest.fixture
def called(monkeypatch):
    """Counts calls of what runs on kernels; of attention apart those with the bounds of texts."""
    classes.differences()  # which tries the parts once a process
    calls: Counter[str] = Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(*given, **named):
            calls[name] += 1
            calls["texts"] += name == "causal_attention" and isinstance(given[5], fused.Segments)
            return function(*given, **named)

        monkeypatch.setattr(module, name, counted)

    for name in PARTS:
        count(fused, name)
    count(text_model, "match_magnitudes")
    count(head, "head_sums")
    return calls


@pytest.fixture(params=["text", "image"])
def case(request, monkeypatch):
    """A model and its data."""
    if request.param == "text":
        return tiny_gemma(layers=2), batch(2, 9)
    return tiny_multimodal(monkeypatch), image_batch()


def kinds(calls):
    return {name for name in ALL if calls[name]}


def test_rows_of_one_length(case, called):
    model, data = case
    assert_same(model, accelerated(model), data)
    assert kinds(called) == ALL
    assert not called["texts"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(case, called, dtype):
    """No further from float64 than the original; in bf16 rounding decides, so the bound is not tight."""
    model, data = case
    model.to(dtype)
    ours = accelerated(model)
    exact_data = {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
    _, exact = gradients(copy.deepcopy(model).double(), exact_data)
    off = {}
    for name, one in (("original", model), ("ours", ours)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(**data).loss
        loss.backward()
        found = {n: p.grad for n, p in one.named_parameters()}
        assert all(g is None or g.dtype == dtype for g in found.values())
        off[name] = sum((found[n].double() - g).norm() ** 2 for n, g in exact.items() if g is not None) ** 0.5
    assert off["ours"] < 1.2 * off["original"]
    assert kinds(called) == ALL


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_padded_rows(case, called, side, checkpointing):
    """Loss and gradients, and logits of all tokens that are no padding."""
    model, data = case
    ours = accelerated(model)
    if checkpointing:
        ours.gradient_checkpointing_enable()
    mask = data["attention_mask"]
    if side != "left":
        mask[0, -2:] = 0
    if side != "right":
        mask[1, :2] = 0
    data["labels"] = data["labels"].masked_fill(mask == 0, -100)
    assert_same(model, ours, data)
    assert kinds(called) == ALL
    assert called["texts"] == called["causal_attention"] >= 2  # every layer, in its first run and when run again
    data.pop("labels")
    model.eval()
    ours.eval()
    with torch.no_grad():
        want, got = (one(**data, use_cache=False).logits for one in (model, ours))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)


def test_only_tokens_that_are_no_padding_are_computed(called):
    model = accelerated(tiny_gemma(layers=2))
    shapes = []
    model.model.layers[0].mlp.register_forward_hook(lambda part, given, output: shapes.append(output.shape))
    data = batch(2, 9)
    data["attention_mask"][0, 4:] = 0
    model(**data)
    assert [tuple(shape[:2]) for shape in shapes] == [(1, 13)]


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_rows(called, rows):
    model = tiny_gemma(layers=4)
    data = batch(rows, 9)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    data |= {"attention_mask": None, "position_ids": places[:rows], "use_cache": False}
    assert_same(model, accelerated(model), data)
    assert kinds(called) == ALL
    assert called["texts"] == called["causal_attention"] == 4


def test_packed_rows_with_an_image(monkeypatch, called):
    model = tiny_multimodal(monkeypatch)
    data = image_batch()
    data |= {
        "attention_mask": None,
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1]] * 2),
        "use_cache": False,
    }
    assert_same(model, accelerated(model), data)
    assert called["texts"] == called["causal_attention"] == 2


@pytest.mark.parametrize("missing", ["hole", "nothing", "cache", "hidden states", "eager"])
def test_layouts_that_need_a_mask_get_one(called, missing):
    """A window counts the tokens that are missing within a row; a cache holds rows."""
    model = tiny_gemma(layers=2, **({"attn_implementation": "eager"} if missing == "eager" else {})).eval()
    ours = accelerated(model)
    data = batch(2, 9)
    mask = data["attention_mask"]
    mask[0, {"hole": slice(2, 4), "nothing": slice(0, 0)}.get(missing, slice(0, 3))] = 0
    asked = {"use_cache": missing == "cache", "output_hidden_states": missing == "hidden states"}
    with torch.no_grad():
        want, got = (one(**data, **asked).logits for one in (model, ours))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)
    assert not called["texts"]


def adapted(model, targets="all-linear", **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)
    return get_peft_model(model, config).train()


SMALL = ["modality_router", "prediction_coefs", "correction_coefs"]


@pytest.mark.parametrize("clip", [None, 0.3])
def test_lora_on_every_map(monkeypatch, called, clip):
    """Those of AltUp are folded into the weights that kernels read."""
    pytest.importorskip("peft")
    for model, data in (
        (tiny_gemma(layers=2), batch()),
        (tiny_multimodal(monkeypatch), image_batch()),
    ):
        object.__setattr__(model.config.get_text_config(), "altup_coef_clip", clip)
        model = adapted(model, SMALL if clip is None else "all-linear")
        ours = accelerated(model)
        called.clear()
        assert_same(model, ours, data, tolerance=3e-5)
        assert kinds(called) == ALL
        got = {name: p.grad for name, p in ours.named_parameters() if "router.lora" in name}
        assert got
        assert all(gradient.norm() > 0 for gradient in got.values())


def test_two_adapters_disabled_and_merged_ones(called):
    pytest.importorskip("peft")
    from peft import LoraConfig

    model = adapted(tiny_gemma(layers=2), SMALL).eval()
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules=SMALL, init_lora_weights=False))
    ours = accelerated(model)
    data = {name: value for name, value in batch().items() if name != "labels"}

    def compare():
        with torch.no_grad():
            got, want = ours(**data).logits, model(**data).logits
        assert distance(got, want) < 1e-5
        return got

    both = []
    for change in (
        lambda one: one.base_model.set_adapter(["default", "other"]),
        lambda one: one.set_adapter("other"),
        lambda one: one.merge_adapter(),
        lambda one: one.unmerge_adapter(),
    ):
        for one in (model, ours):
            change(one)
        both.append(compare())
    assert distance(both[0], both[1]) > 1e-3
    with model.disable_adapter(), ours.disable_adapter():
        assert distance(compare(), both[1]) > 1e-3
    assert called["predict"]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}])
def test_other_adapters_compute_as_the_original_does(called, options):
    pytest.importorskip("peft")
    model = adapted(tiny_gemma(layers=2), SMALL, **options)
    ours = accelerated(model)
    results = []
    for one in (model, ours):
        torch.manual_seed(4)
        results.append(gradients(one, batch()))
    assert distance(results[1][0], results[0][0]) < 1e-5
    assert not called["predict"]
    assert called["norm_rotary"]
