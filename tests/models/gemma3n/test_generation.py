"""`generate` of an accelerated Gemma 3n: with a cache of fixed places, and recorded on a GPU, it gives the tokens
that Hugging Face's own code gives."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from transformers import TextStreamer

from altup.core import errors
from altup.models.gemma3n.fixed_cache import FixedCache
from tests.models.gemma3n.tiny import accelerated, batch, tiny_gemma

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def prompts(rows, length, device="cpu"):
    """Rows of different lengths, padded on the left."""
    ids = batch(rows, length + 3)["input_ids"][:, 3:]
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : min(2 * row, length - 1)] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def fixed(model, inputs, new_tokens, **options):
    """Through `generate` with a cache of ours, as a GPU does it, without a graph on a CPU."""
    limit = inputs["input_ids"].shape[1] + new_tokens
    cache = FixedCache(model.config.get_text_config(), limit)
    return model.generate(**inputs, max_new_tokens=new_tokens, past_key_values=cache, **{**GREEDY, **options})


@pytest.mark.parametrize(
    ("rows", "length", "implementation"), [(1, 1, "plain"), (1, 12, "auto"), (3, 4, "plain"), (3, 12, "plain")]
)
def test_tokens_with_fixed_places(rows, length, implementation):
    """Windows of 5 tokens: prompts shorter and longer than one, and texts that go round several times."""
    model = tiny_gemma().eval()
    inputs = prompts(rows, length)
    want = model.generate(**inputs, max_new_tokens=30, **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = accelerated(model, implementation)
    assert torch.equal(fixed(ours, inputs, 30), want)


@torch.no_grad()
@pytest.mark.parametrize("window", [3, 200])
def test_logits_with_fixed_places(window):
    """Every token's, to rounding; a window as long as the text too, and layers that share no keys."""
    model = tiny_gemma(sliding_window=window, num_kv_shared_layers=0).eval()
    ours = accelerated(model)
    ids = batch(2, 20)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    want = model(ids, attention_mask=mask, position_ids=places).logits
    cache = FixedCache(model.config, 20)
    got = [ours(ids[:, :4], attention_mask=mask[:, :4], position_ids=places[:, :4], past_key_values=cache).logits]
    for i in range(4, 20):
        step = ours(ids[:, i : i + 1], position_ids=places[:, i : i + 1], past_key_values=cache)
        got.append(step.logits.clone())
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)


def test_places_are_counted_where_none_are_given():
    model = tiny_gemma().eval()
    ours = accelerated(model)
    ids = batch(2, 9)["input_ids"]
    cache = FixedCache(model.config, 9)
    with torch.no_grad():
        for i in range(9):
            step = ours(ids[:, i : i + 1], past_key_values=cache)
        torch.testing.assert_close(step.logits, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-5)


def test_a_full_cache_is_refused():
    ours = accelerated(tiny_gemma().eval())
    cache = FixedCache(ours.config, 64)
    ours(batch(1, 64)["input_ids"], past_key_values=cache)
    with pytest.raises(errors.UserError, match="of 64 tokens that holds 64 does not take 1 more"):
        ours(batch(1, 3)["input_ids"][:, :1], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 9])
def test_the_cache_that_is_given_back_is_hugging_faces(length):
    """So that someone goes on with it, as with that of the original."""
    model = tiny_gemma().eval()
    ours = accelerated(model)
    ids = batch(2, length + 4)["input_ids"]
    want = model(ids[:, :-2], use_cache=True).past_key_values
    cache = FixedCache(ours.config, 40)
    ours(ids[:, :length], past_key_values=cache)
    for i in (length, length + 1):
        ours(ids[:, i : i + 1], past_key_values=cache)
    got = cache.as_dynamic()
    assert type(got) is type(want)
    assert got.get_seq_length() == want.get_seq_length()
    for one, other in zip(got.layers, want.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)
    both = [one(ids[:, -2:], past_key_values=cache).logits for one, cache in ((ours, got), (model, want))]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 5},
        {"repetition_penalty": 1.3, "bad_words_ids": [[7]]},
        {"num_return_sequences": 2, "do_sample": True},
        {"eos_token_id": [5, 9, 11]},
    ],
)
def test_the_loop_is_hugging_faces(options):
    model = tiny_gemma().eval()
    ours = accelerated(model)
    inputs = prompts(2, 6)
    torch.manual_seed(3)
    want = model.generate(**inputs, max_new_tokens=20, **{**GREEDY, **options})
    torch.manual_seed(3)
    assert torch.equal(fixed(ours, inputs, 20, **options), want)


# On a GPU


@pytest.fixture
def strict():
    """What falls back says so, and here nothing may."""
    errors.WARNED.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="altup.accelerate")
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products", "strict")
@pytest.mark.parametrize(("rows", "length"), [(1, 12), (3, 4)])
def test_recorded_tokens(rows, length):
    model = tiny_gemma().eval().cuda()
    inputs = prompts(rows, length, device="cuda")
    want = model.generate(**inputs, max_new_tokens=70, **GREEDY)
    ours = accelerated(model, "auto")
    assert torch.equal(ours.generate(**inputs, max_new_tokens=70, **GREEDY), want)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=70, **GREEDY), want)  # another recording


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products", "strict")
def test_recorded_tokens_go_through_hugging_faces_loop():
    """Sampling, scores, a streamer, and the cache that comes back."""
    model = tiny_gemma().eval().cuda()
    ours = accelerated(model, "auto")
    inputs = prompts(2, 6, device="cuda")
    both = []
    for one in (model, ours):
        torch.manual_seed(3)
        options = {**GREEDY, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
        both.append(one.generate(**inputs, max_new_tokens=20, **options))
    assert torch.equal(both[0].sequences, both[1].sequences)
    torch.testing.assert_close(both[0].scores, both[1].scores, rtol=1e-4, atol=1e-4)
    for one, other in zip(both[0].past_key_values.layers, both[1].past_key_values.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)

    class Words(TextStreamer):
        def __init__(self):
            self.heard = []

        def put(self, value):
            self.heard += value.flatten().tolist()

        def end(self):
            pass

    words = Words()
    row = {name: value[:1] for name, value in inputs.items()}
    made = ours.generate(**row, max_new_tokens=9, streamer=words, **GREEDY)
    assert words.heard == made[0].tolist()


@pytest.mark.gpu
def test_what_is_not_recorded_says_so_and_is_right():
    model = tiny_gemma().eval().cuda()
    ours = accelerated(model, "auto")
    inputs = prompts(2, 6, device="cuda")
    errors.WARNED.clear()
    for options, reason in (
        ({"num_beams": 2}, "beam search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states are asked for"),
    ):
        want = model.generate(**inputs, max_new_tokens=6, **GREEDY, **options)
        with pytest.warns(UserWarning, match=reason):
            got = ours.generate(**inputs, max_new_tokens=6, **GREEDY, **options)
        pair = (got, want) if isinstance(got, torch.Tensor) else (got.sequences, want.sequences)
        assert torch.equal(*pair)


@pytest.mark.gpu
@pytest.mark.usefixtures("strict")
def test_a_recording_goes_with_its_call():
    """Neither the cache nor the graph's memory waits for the garbage collector."""
    ours = accelerated(tiny_gemma().eval().cuda(), "auto")
    inputs = prompts(2, 6, device="cuda")
    ours.generate(**inputs, max_new_tokens=8, **GREEDY)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        ours.generate(**inputs, max_new_tokens=8, **GREEDY)
        assert torch.cuda.memory_allocated() <= before + 2**16
    finally:
        gc.enable()


def test_a_cache_that_was_used_is_freed():
    ours = accelerated(tiny_gemma().eval())
    cache = FixedCache(ours.config, 64)
    for length in (3, 1, 1):
        ours(batch(1, 3)["input_ids"][:, :length], past_key_values=cache)
    seen = weakref.ref(cache)
    cache.release()
    gc.disable()
    try:
        del cache
        assert seen() is None
    finally:
        gc.enable()
