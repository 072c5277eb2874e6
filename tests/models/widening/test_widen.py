"""A widened Hugging Face model computes what the original does, and works wherever the original does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import CompileConfig

from altup import widen
from tests.models.widening.families import FAMILIES, build, inputs

METHODS = ["recycled", "altup", "sameup"]
GENERATING = [name for name in FAMILIES if build(name).can_generate()]


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def assert_same_function(model, wide, **options):
    batch = inputs(model)
    with torch.no_grad():
        expected, found = model(**batch, **options), wide(**batch, **options)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_blocks", [2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_function(family, method, num_blocks):
    """On a padded batch; eager attention for K = 2 and SDPA for K = 3 (the whole grid is a slow test)."""
    model = build(family, "eager" if num_blocks == 2 else "sdpa")
    wide = widen(copy.deepcopy(model), method, num_blocks)
    assert type(wide) is type(model)
    assert_same_function(model, wide)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_function_everywhere(family, method, num_blocks, attention):
    model = build(family, attention)
    wide = widen(copy.deepcopy(model), method, num_blocks)
    assert_same_function(model, wide)
    if model.can_generate():
        assert_same_text(model, wide, num_beams=2)


def assert_same_text(model, wide, **options):
    batch = without_labels(inputs(model))
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    assert torch.equal(wide.generate(**batch, **options), model.generate(**batch, **options))


def test_a_static_cache_and_a_compiled_model_write_the_same_text():
    """As one graph, so that a GPU can record it: the way around a host that launches kernel by kernel."""
    wide = widen(build("llama"), "altup").eval()
    with torch.no_grad():
        for name, p in wide.named_parameters():
            if ".altup." in name:
                p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    how = CompileConfig(backend="eager", fullgraph=True, mode=None)
    how._compile_all_devices = True  # transformers compiles for GPUs alone
    batch = without_labels(inputs(wide))
    options = {"max_new_tokens": 6, "do_sample": False}
    torch._dynamo.utils.counters.clear()
    recorded = wide.generate(**batch, **options, cache_implementation="static", compile_config=how)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(recorded, wide.generate(**batch, **options))


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("family", GENERATING)
def test_same_text_with_a_cache(family, method):
    model = build(family)
    wide = widen(copy.deepcopy(model), method)
    assert_same_text(model, wide)


@pytest.mark.parametrize("family", ["t5", "llama", "gemma3"])
def test_cache_agrees_with_no_cache_once_the_blocks_differ(family):
    """Generation with a cache must carry nothing over but keys and values."""
    wide = widen(build(family), "altup", 3)
    part(wide)
    batch = without_labels(inputs(wide))
    texts = [wide.generate(**batch, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*texts)


def part(wide):
    """Move every coefficient away from its start."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if ".altup." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))


def by_hand(x, layers, updates, active):
    """Algorithm 1 written out for K copies of x: predict, compute on the old block, correct."""
    state = [x] * updates[0].P.shape[0]
    for layer, update, a in zip(layers, updates, active, strict=True):
        P, g = update.P, update.g
        predicted = [sum(P[i, j] * state[j] for j in range(len(state))) for i in range(len(state))]
        y = layer(state[a])
        state = [predicted[i] + g[i] * (y - predicted[a]) for i in range(len(state))]
    return state


@pytest.mark.parametrize("method", METHODS)
def test_trained_coefficients_do_what_the_paper_says(method):
    """Llama's layers called by hand on each active block, the rest of the model as it is."""
    model = build("llama")
    wide = widen(copy.deepcopy(model), method, 3)
    part(wide)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    positions = torch.arange(5).unsqueeze(0)
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, position_ids=positions)
    causal = torch.full((5, 5), float("-inf")).triu(1)[None, None]

    def run(layer):
        return lambda x: layer(x, attention_mask=causal, position_embeddings=rotary)

    updates = [layer.altup for layer in wide.model.layers]
    active = [0] * 4 if method == "sameup" else [0, 1, 2, 0]
    state = by_hand(hidden, [run(layer) for layer in model.model.layers], updates, active)
    if method == "recycled":
        expected = model.lm_head(model.model.norm(sum(state) / 3))
    else:
        x = torch.cat(state, dim=-1)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        normed = normed * model.model.norm.weight.repeat(3)
        parts = zip(normed.chunk(3, dim=-1), (0.5, 0.25, 0.25), strict=True)
        expected = sum(part * model.lm_head(block) for block, part in parts)
    torch.testing.assert_close(wide(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("selection", "blocks"), [(None, [0, 1, 0, 1]), ("same", [0] * 4), ([1, 1, 0, 1], [1, 1, 0, 1])]
)
def test_selection(selection, blocks):
    wide = widen(build("llama"), selection=selection)
    assert [layer.altup.active for layer in wide.model.layers] == blocks


@pytest.mark.parametrize("method", ["recycled", "altup"])
@pytest.mark.parametrize("family", ["t5", "bert", "gpt2", "gemma3", "vit", "whisper"])
def test_hidden_states_are_those_of_the_first_block(family, method):
    model = build(family)
    wide = widen(copy.deepcopy(model), method)
    batch = inputs(model)
    with torch.no_grad():
        expected, found = (each(**batch, output_hidden_states=True) for each in (model, wide))
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if getattr(expected, name, None) is not None:
            pairs = list(zip(getattr(found, name), getattr(expected, name), strict=True))
            last = pairs.pop()
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            torch.testing.assert_close(last[0][..., : last[1].shape[-1]], last[1], rtol=0, atol=1e-5)


QUICK_TO_COMPILE = [("llama", "recycled"), ("vit", "altup")]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if (family, method) in QUICK_TO_COMPILE else pytest.mark.slow)
        for family in FAMILIES
        for method in ("recycled", "altup")
    ],
)
def test_compiles_whole_where_the_original_does(family, method):
    """Forward and backward; `fullgraph` fails on the first graph break."""
    model = build(family)
    batch = inputs(model)

    def compiled(model):
        torch._dynamo.reset()
        return torch.compile(model, fullgraph=True, backend="eager")(**batch).loss

    try:
        expected = compiled(model)
    except torch._dynamo.exc.Unsupported:
        pytest.skip(f"Hugging Face's own {family} does not compile without graph breaks")
    loss = compiled(widen(copy.deepcopy(model), method))
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "llama", "bert"])
def test_inductor_agrees(family):
    wide = widen(build(family), "altup", 3)
    part(wide)
    batch = inputs(wide)
    torch._dynamo.reset()
    found = torch.compile(wide)(**batch)
    torch.testing.assert_close(found.logits, wide(**batch).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["t5", "bert", "llama"])
def test_half_precision(family):
    """Coefficients stay float32; the function is that of the bfloat16 original up to bfloat16."""
    model = build(family).bfloat16()
    wide = widen(copy.deepcopy(model), "altup", 3)
    dtypes = {p.dtype for n, p in wide.named_parameters() if ".altup." in n}
    assert dtypes == {torch.float32}
    assert wide.dtype == torch.bfloat16
    batch = inputs(model)
    torch.testing.assert_close(wide(**batch).logits, model(**batch).logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied):
    wide = widen(build("t5"), "altup")
    part(wide)
    other = copied(wide)
    batch = inputs(wide)
    torch.testing.assert_close(other(**batch).logits, wide(**batch).logits)
    with torch.no_grad():
        other.encoder.block[0].altup.P.zero_()
    assert wide.encoder.block[0].altup.P.abs().sum() > 0


@pytest.mark.parametrize("order", ["widen first", "dispatch first"])
def test_with_a_device_map(order):
    """Accelerate's hooks replace a layer's forward; both orders must work."""
    accelerate = pytest.importorskip("accelerate")
    model = build("llama")
    wide = copy.deepcopy(model)
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "cpu" for i in range(4)}
    if order == "widen first":
        widen(wide)
    accelerate.dispatch_model(wide, device_map, force_hooks=True)
    if order == "dispatch first":
        widen(wide)
    part(wide)
    batch = inputs(model)
    plain = widen(copy.deepcopy(model))
    part(plain)
    torch.testing.assert_close(wide(**batch).logits, plain(**batch).logits)
    assert not torch.allclose(wide(**batch).logits, model(**batch).logits, atol=1e-3)


def test_layers_stay_whole_on_a_device_map():
    accelerate = pytest.importorskip("accelerate")
    wide = widen(build("llama"))
    size = sum(p.numel() * 4 for p in wide.parameters())
    places = accelerate.infer_auto_device_map(
        wide, {0: size // 3, "cpu": 10 * size}, no_split_module_classes=wide._no_split_modules
    )
    assert not any(".altup" in name or ".self_attn" in name for name in places)


def test_k_is_the_number_of_blocks():
    assert widen(build("llama"), k=3).config.altup["num_blocks"] == 3


def test_resized_vocabulary():
    wide = widen(build("gpt2"), "altup")
    wide.resize_token_embeddings(111)
    assert wide.get_input_embeddings().weight.shape == (111, 64)
    assert wide.lm_head.weight.shape == (111, 64)
    assert wide(torch.tensor([[110, 3]])).logits.shape == (1, 2, 111)


def test_models_of_one_config_stay_apart():
    """Widening one leaves the other's config alone, and settings still reach every part of either."""
    model = build("llama")
    other = type(model)(model.config)
    assert other.config is model.config
    widen(model, "altup")
    assert not hasattr(other.config, "altup")
    assert not hasattr(other.model.config, "altup")
    widen(other, "recycled", 3)
    assert (model.config.altup["method"], other.config.altup["method"]) == ("altup", "recycled")
    assert model.model.layers[0].self_attn.config is model.config is model.model.config
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([[3, 4, 5]]), output_attentions=True).attentions
    assert attentions[0].shape == (1, 4, 3, 3)


def test_only_what_was_said_is_added():
    """Recycled: K² + K scalars a layer. AltUp: those, and the wide table, norm and head."""
    model = build("llama")
    count = sum(p.numel() for p in model.parameters())
    recycled = widen(copy.deepcopy(model), "recycled", 3)
    assert sum(p.numel() for p in recycled.parameters()) == count + 4 * 12
    wide = widen(copy.deepcopy(model), "altup", 3)
    assert sum(p.numel() for p in wide.parameters()) == count + 4 * 12 + 2 * (2 * 97 * 32 + 32)
