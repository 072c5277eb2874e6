"""Gemma 3n on the kernels, on a GPU: as close to float64 as Hugging Face's own code, and never the logits."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Gemma3nForCausalLM

import altup
from tests.models.gemma3n.test_recipes import ALL, adapted, called, kinds
from tests.models.gemma3n.tiny import (
    accelerated,
    assert_same,
    batch,
    gradients,
    plain_batch,
    stir,
    tiny_config,
    tiny_gemma,
)

__all__ = ["called"]  # a fixture
pytestmark = pytest.mark.gpu


def on_gpu(data):
    return {name: value.cuda() for name, value in data.items()}


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("K", "active"), [(2, 1), (4, 0), (8, 3)])
def test_float32(K, active):
    model = tiny_gemma(K, active, altup_coef_clip=0.3).cuda()
    assert_same(model, accelerated(model, "auto"), on_gpu(batch(3, 33)), tolerance=3e-5)


@pytest.mark.usefixtures("exact_products")
def test_float32_with_what_is_made_again():
    model = tiny_gemma(4, 0, altup_coef_clip=0.3).cuda()
    assert_same(model, accelerated(model, "auto", remake=True), on_gpu(batch(3, 33)), tolerance=3e-5)


def peak(model, data):
    gradients(model, data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    gradients(model, data)
    return torch.cuda.max_memory_allocated()


def test_what_is_made_again_takes_no_memory():
    model = wide_gemma(intermediate_size=6144, vocab_size=500).bfloat16()
    data = on_gpu(batch(4, 512))
    kept = 4 * 512 * 1536 * 2  # bytes of a block; of four layers' 4 + 6 blocks, some are alive at the peak
    assert peak(accelerated(model, "auto", remake=True), data) < peak(accelerated(model, "auto"), data) - 20 * kept


def wide_gemma(seed=0, **more):
    """Wide enough that a token takes several tiles, with a vocabulary of several chunks' worth. Its attention is
    smooth: where one key takes all, a rounding becomes another key, and a gradient anything."""
    torch.manual_seed(seed)
    config = tiny_config(4, **{"layers": 4, "hidden_size": 1536, "vocab_size": 50_000, "head_dim": 64, **more})
    model = Gemma3nForCausalLM(config)
    for name, p in model.named_parameters():
        if "correct_output_scale" in name or "modality_router" in name:
            torch.nn.init.normal_(p)
        if "q_norm" in name:
            torch.nn.init.constant_(p, 0.1)
    return model.cuda().train()


def errors_in_bfloat16(seed, remake=False, **more):
    """Of all gradients, relative to float64: Hugging Face's and ours."""
    model = wide_gemma(seed, **more).bfloat16()
    data = on_gpu(batch(2, 200))
    _, exact = gradients(copy.deepcopy(model).double(), data)
    exact = {name: g for name, g in exact.items() if g is not None}
    size = sum(g.norm() ** 2 for g in exact.values()) ** 0.5
    for one in (model, accelerated(model, "auto", remake=remake)):
        _, found = gradients(one, data)
        yield float(sum((found[n].double() - g).norm() ** 2 for n, g in exact.items()) ** 0.5 / size)


@pytest.mark.parametrize("remake", [False, True])
def test_bfloat16_is_no_further_from_float64_than_the_original(remake):
    """On the mean of several models: another rounding moves the error of one by a third, either way."""
    small = {"layers": 2, "vocab_size": 500, "num_kv_shared_layers": 0}
    theirs, ours = map(sum, zip(*(errors_in_bfloat16(seed, remake, **small) for seed in range(12)), strict=True))
    assert ours < 1.25 * theirs


def rows_of_several_lengths(layout):
    data = on_gpu(batch(3, 200))
    if layout == "padded":
        data["attention_mask"][0, -60:] = 0
        data["attention_mask"][1, :30] = 0
        data["labels"] = data["labels"].masked_fill(data["attention_mask"] == 0, -100)
        return data
    places = torch.cat([torch.arange(length) for length in (7, 150, 43)]).cuda()
    return {**data, "attention_mask": None, "position_ids": places.unsqueeze(0), "use_cache": False}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_of_several_lengths_are_no_further_from_float64(called, layout, autocast):
    """By FlashAttention's variable-length form: rows padded on either side, and packed ones; float32 weights under
    autocast, too."""
    off = {"original": 0.0, "ours": 0.0}
    for seed in range(6):
        model = wide_gemma(seed, layers=2, vocab_size=500, num_kv_shared_layers=0)
        model = model if autocast else model.bfloat16()
        data = rows_of_several_lengths(layout)
        _, exact = gradients(copy.deepcopy(model).double(), data)
        exact = {name: g for name, g in exact.items() if g is not None}
        size = sum(g.norm() ** 2 for g in exact.values()) ** 0.5
        for name, one in (("original", model), ("ours", accelerated(model, "auto"))):
            one.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = one(**data).loss
            loss.backward()
            wrong = sum((p.grad.double() - exact[n]).norm() ** 2 for n, p in one.named_parameters() if n in exact)
            off[name] += float(wrong**0.5 / size)
    assert off["ours"] < 1.25 * off["original"]
    assert kinds(called) == ALL
    assert called["texts"] == called["causal_attention"] == 2 * 6


def test_lora_on_altups_maps(called):
    pytest.importorskip("peft")
    model = adapted(wide_gemma(layers=2, vocab_size=500, num_kv_shared_layers=0).bfloat16(), "all-linear")
    ours = accelerated(model, "auto")
    loss, want = gradients(model, on_gpu(batch(2, 200)))
    our_loss, got = gradients(ours, on_gpu(batch(2, 200)))
    assert (our_loss - loss).abs() < 2e-2 * loss.abs()
    names = [name for name, g in want.items() if g is not None and "router.lora" in name]
    assert names
    assert all(torch.isfinite(got[name]).all() and got[name].norm() > 0 for name in names)
    assert kinds(called) == ALL


def test_the_same_bits_twice():
    model = accelerated(wide_gemma().bfloat16(), "auto")
    data = on_gpu(batch(2, 100))
    first = {name: g.clone() for name, g in gradients(model, data)[1].items() if g is not None}
    again = gradients(model, data)[1]
    different = [name for name, g in first.items() if not torch.equal(again[name], g)]
    assert all(
        "embed" in name or "lm_head" in name for name in different
    )  # their sums are PyTorch's, with atomics


def test_logits_are_never_held():
    model = wide_gemma().bfloat16()
    data = on_gpu(batch(4, 512))
    logits = 4 * 512 * 50_000 * 4
    assert peak(accelerated(model, "auto"), data) < peak(model, data) - logits


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_generate(options):
    torch.manual_seed(0)
    model = tiny_gemma().cuda().eval()
    ours = accelerated(model, "auto")
    ids = batch(2, 8)["input_ids"].cuda()
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **given, **options), model.generate(ids, **given))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("layers", [False, True])
def test_compiled(layers):
    model = tiny_gemma(4).cuda()
    ours = accelerated(model, "auto", compile=layers)
    if not layers:
        ours.compile()
    assert_same(model, ours, on_gpu(batch(2, 16)), tolerance=1e-4)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("length", [7, 33])
def test_recorded_training(length):
    ours = accelerated(tiny_gemma(4).cuda(), "auto")
    batches = [plain_batch(seed, 2, length) for seed in range(5)]
    batches = [
        {**data, "input_ids": data["input_ids"].cuda(), "labels": data["labels"].cuda()} for data in batches
    ]
    want = [gradients(ours, data) for data in batches]
    altup.accelerate(ours, record=True)
    for data, (loss, exact) in zip(batches, want, strict=True):
        our_loss, found = gradients(ours, data)
        torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=1e-6)
        for name, g in exact.items():
            if g is not None:
                torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-5)
    assert len(ours._compiled_call_impl._recorded) == 1


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("remake", [False, True])
def test_a_recorded_loop_trains_as_launched(remake):
    """Gradients are the graphs' own: accumulated, scaled in place, or forgotten after the next forward pass; two
    shapes share memory."""
    trained = []
    for record in (False, True):
        model = accelerated(tiny_gemma(4).cuda(), "auto", record=record, remake=remake)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for seed in range(16):
            data = plain_batch(seed, 1 + seed // 2 % 2, 33)
            loss = model(**{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in data.items()}).loss
            if seed % 4 == 0:  # what is left of the step before
                optimizer.zero_grad()
            (loss / 2).backward()
            if seed % 3:  # else the next one adds to it
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if seed % 4 == 2:
                optimizer.zero_grad()
        trained.append([p.detach().clone() for p in model.parameters()])
        if record:
            assert len(model._compiled_call_impl._recorded) == 2
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_moved_to_a_gpu_afterwards():
    model = tiny_gemma(4)
    ours = accelerated(model, "auto").cuda()
    stir(ours)
    assert ours(**on_gpu(batch())).logits is None  # the kernels' head
    assert altup.decelerate(ours)(**on_gpu(batch())).logits is not None
