"""The fast greedy decoding against Hugging Face's own loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, StaticCache

import altup
from altup import AltUpT5ForConditionalGeneration
from altup.kernels.cuda_graph import Replay
from altup.models.recorded_decoding import free_memory, is_hooked
from altup.models.t5 import generation, kept_decoding
from altup.models.t5.kept_decoding import can_keep
from tests.models.helpers import batch, regret, tiny_t5
from tests.recordings import REFUSED, PretendedGraphs


class QuantizedLike(DynamicCache):
    """A cache with a way of its own to keep what it is given."""


LIMITS = [2, 4, 5, 17, 30]


def hugging_face(model, inputs, **options):
    """Hugging Face's loop, which the model's own replaces for plain greedy decoding."""
    inherited = model.__class__._sample
    try:
        model.__class__._sample = GenerationMixin._sample
        return model.generate(**inputs, do_sample=False, **options)
    finally:
        model.__class__._sample = inherited


def decode(model, inputs, limit, eos, start=None, kept=None):
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
        kept=kept,
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


@pytest.mark.parametrize("method", ["dense", "altup", "altup, fixed", "recycled", "sum", "average-pooling"])
def test_what_is_kept_decodes_other_batches_of_the_same_shape(method):
    """The first call is decoded as ever, the second makes what is kept, the others use it."""
    name, _, fixed = method.partition(", ")
    model, kept = tiny_t5(name, coefficients=fixed or "static").eval(), {}
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    ends = list(likely_ends(model, inputs))
    for number in range(5):
        rows = inputs["input_ids"].roll(number, dims=0).roll(number, dims=1)
        mask = inputs["attention_mask"].roll(number, dims=0)
        limit = 20 if number < 4 else 9
        found = decode(model, {"input_ids": rows, "attention_mask": mask}, limit, ends, kept=kept)
        want = decode(model, {"input_ids": rows, "attention_mask": mask}, limit, ends)
        assert torch.equal(found, want), number
    assert [decoding is None for decoding in kept.values()] == [False, True]
    assert can_keep(model)
    assert not can_keep(model.train())  # whose dropout a kept step would leave out


def six_calls(method="altup"):
    """A model, calls of two shapes, and what it decodes without graphs."""
    model = tiny_t5(method).eval()
    ids, mask = (batch()[name] for name in ("input_ids", "attention_mask"))
    calls = [({"input_ids": ids.roll(n, dims=0), "attention_mask": mask.roll(n, dims=0)}, 20) for n in range(4)]
    calls += [(inputs, 14) for inputs, _ in calls[:2]]
    return model, calls, [decode(model, *call, None) for call in calls]


class TestWhereRecordingFails:
    """A shape's first call records a step, its second what a call begins with and a step, in that order."""

    @pytest.fixture
    def graphs(self, monkeypatch):
        return lambda: PretendedGraphs(monkeypatch, generation, kept_decoding)

    @pytest.mark.parametrize("method", ["dense", "altup", "recycled"])
    @pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
    def test_steps_are_launched_and_give_the_same_text(self, method, number, graphs, recwarn):
        model, calls, want = six_calls(method)
        pretended, kept = graphs(), {}
        pretended.fail[number] = RuntimeError(f"{REFUSED}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        for call, text in zip(calls, want, strict=True):
            assert torch.equal(decode(model, *call, None, kept=kept), text)
            assert pretended.stream is pretended.main
        assert pretended.begun == number  # nothing is tried again
        parts = [[type(part) is Replay for part in (one.begin, one.step)] for one in kept.values()]
        assert parts == [[number > 3] * 2, [False, False]]  # both or none
        assert [str(warning.message).endswith(f"as a CUDA graph: {REFUSED}") for warning in recwarn] == [True]

    def test_recordings_that_do_not_fail(self, graphs, recwarn):
        """What the tests around this one pretend, is enough to decode."""
        model, calls, want = six_calls()
        pretended, kept = graphs(), {}
        for call, text in zip(calls, want, strict=True):
            assert torch.equal(decode(model, *call, None, kept=kept), text)
        assert pretended.begun == 6
        assert all(type(part) is Replay for one in kept.values() for part in (one.begin, one.step))
        assert not recwarn

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_too_little_memory_says_nothing_of_other_shapes(self, number, graphs, recwarn):
        model, calls, want = six_calls()
        pretended, kept = graphs(), {}
        pretended.fail[number] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        for call, text in zip(calls, want, strict=True):
            assert torch.equal(decode(model, *call, None, kept=kept), text)
        assert pretended.begun == (5 if number == 2 else 6)
        assert type(list(kept.values())[-1].step) is Replay
        assert [str(warning.message).endswith(": CUDA out of memory") for warning in recwarn] == [True]

    def test_no_memory_for_what_would_be_kept(self, graphs, monkeypatch, recwarn):
        model, calls, want = six_calls()
        pretended, kept, tried = graphs(), {}, []

        def make(*args):
            tried.append(args)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr(kept_decoding, "Layer", make)
        for call, text in zip(calls, want, strict=True):
            assert torch.equal(decode(model, *call, None, kept=kept), text)
        assert len(tried) == 2  # once a shape
        assert pretended.begun == 6  # each call records its own step
        assert len(recwarn) == 1

    def test_an_error_that_launching_does_not_avoid_reaches_the_user(self, graphs, monkeypatch, recwarn):
        model, calls, want = six_calls()
        graphs()
        kept: dict[Any, Any] = {}
        decode(model, *calls[0], None, kept=kept)
        with monkeypatch.context() as patch:
            error = torch.OutOfMemoryError("CUDA out of memory")
            patch.setattr(kept_decoding.Layer, "__call__", lambda *_: raise_(error))
            for call in calls[1:3]:
                with pytest.raises(torch.OutOfMemoryError):
                    decode(model, *call, None, kept=kept)
        assert torch.equal(decode(model, *calls[3], None, kept=kept), want[3])


def raise_(error):
    raise error


def test_goes_on_behind_given_tokens():
    model = tiny_t5("altup").eval()
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    start = torch.tensor([[0, 5, 9]] * len(inputs["input_ids"]))
    want = hugging_face(model, inputs, max_length=20, decoder_input_ids=start)
    assert torch.equal(decode(model, inputs, 20, [1], start), want)


class Asked(AltUpT5ForConditionalGeneration):
    """Notes whether the fast way would have been taken, had this been a GPU."""

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        plain = generation._is_greedy(generation_config, logits_processor, stopping_criteria, kwargs)
        self.fast = plain and not is_hooked(self)
        return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def takes_the_fast_way(model, **options):
    model.fast = False
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(**{**inputs, "max_new_tokens": 3, **options})
    return model.fast


class TestWhenTheFastWayIsTaken:
    @pytest.fixture
    def model(self):
        model = tiny_t5("altup")
        model.__class__ = Asked
        return model

    @pytest.mark.parametrize(
        "options",
        [{}, {"eos_token_id": [1, 5]}, {"eos_token_id": None}, {"temperature": 0.7}, {"use_cache": True}],
    )
    def test_plain_greedy(self, model, options):
        assert takes_the_fast_way(model, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"do_sample": True},
            {"num_beams": 2},
            {"return_dict_in_generate": True},
            {"repetition_penalty": 1.5},
            {"no_repeat_ngram_size": 2},
            {"min_new_tokens": 2},
            {"logits_processor": [lambda ids, scores: -scores]},
            {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] == 7]},
            {"max_time": 100.0},
            {"use_cache": False},
            {"cache_implementation": "static"},
            {"past_key_values": EncoderDecoderCache(QuantizedLike(), DynamicCache())},
            {"decoder_input_ids": torch.zeros(3, 2).long(), "decoder_attention_mask": torch.ones(3, 2).long()},
            {"prompt_lookup_num_tokens": 2, "input_ids": torch.ones(1, 5).long(), "attention_mask": None},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_anything_else_steps_aside(self, model, options):
        assert not takes_the_fast_way(model, **options)

    def test_hooks_are_called_for_every_step(self, model):
        """Of users, and of accelerate, which replaces the forward of modules that lie elsewhere."""
        handle = model.decoder.layers[1].register_forward_hook(lambda *_: None)
        assert not takes_the_fast_way(model)
        handle.remove()
        assert takes_the_fast_way(model)
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(model.decoder.layers[1], hooks.AlignDevicesHook("cpu"))
        assert not takes_the_fast_way(model)


@pytest.mark.parametrize("method", ["dense", "altup", "dense-wide", "sequence-altup"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_cache_fits_where_four_of_them_are_free(method, autocast):
    """Counted from the cache that a step really fills."""
    model, limit = tiny_t5(method, num_decoder_layers=2).eval(), 37
    cache = EncoderDecoderCache(StaticCache(model.config, max_cache_len=limit), DynamicCache())
    inputs = {name: tensor for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(**inputs, decoder_input_ids=torch.zeros(3, 1).long(), past_key_values=cache, use_cache=True)
        layers: Any = cache.self_attention_cache.layers
        used = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        assert generation.fits(model, 3, limit, free=4 * used)
        assert not generation.fits(model, 3, limit, free=4 * used - 1)


@pytest.mark.gpu
def test_a_cache_that_would_fill_the_memory_is_not_made():
    """Two million tokens for each of 4,096 rows: terabytes. Every token ends a text, so one is used."""
    model = tiny_t5("altup").cuda()
    rows = torch.ones(4096, 5, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    free = free_memory(rows.device)
    ends = list(range(model.config.vocab_size))
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    found = model.generate(**inputs, max_new_tokens=2_000_000, eos_token_id=ends, do_sample=False)
    assert found.shape == (4096, 2)
    assert torch.cuda.max_memory_allocated() < free / 4


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dense", "altup", "recycled", "sequence-altup", "moe"])
@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_steps_give_the_tokens_of_hugging_faces_loop(method, autocast, recwarn):
    model = tiny_t5(method).eval().cuda()
    inputs = {name: tensor.cuda() for name, tensor in batch().items() if name in ("input_ids", "attention_mask")}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        for eos in ([1], list(likely_ends(model, inputs)), None):
            for limit in LIMITS:
                want = hugging_face(model, inputs, max_length=limit, eos_token_id=eos)
                got = model.generate(**inputs, max_length=limit, eos_token_id=eos, do_sample=False)
                assert torch.equal(got, want), (eos, limit)
    assert not recwarn  # as where a step is launched


AS_BASE = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "num_layers": 1, "num_decoder_layers": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dense", "altup", "recycled"])
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("autocast", "shape"), [(False, {}), (True, {}), (True, AS_BASE)])
def test_an_accelerated_model_decodes_the_same_from_what_it_has_recorded(method, rows, autocast, shape):
    model = tiny_t5(method, **shape).eval().cuda()
    ids = torch.randint(3, 100, (rows + 1, 12), device="cuda")
    mask = (torch.arange(12, device="cuda") < 12 - torch.arange(rows + 1, device="cuda")[:, None] % 7).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        ends = list(likely_ends(model, inputs))
        for number in range(4):
            prompts = {name: tensor.roll(number, dims=0)[:rows] for name, tensor in inputs.items()}
            altup.decelerate(model)
            want = model.generate(**prompts, max_length=20, eos_token_id=ends, do_sample=False)
            if number == 0:
                altup.accelerate(model, compile=False)
                calls = model._compiled_call_impl
            model._compiled_call_impl = calls
            got = model.generate(**prompts, max_length=20, eos_token_id=ends, do_sample=False)
            assert torch.equal(got, want) or (autocast and regret(model, prompts, got, ends) < 0.2), number
    assert all(decoding.is_fused for decoding in calls._decodings.values())
    assert all(type(decoding.step) is Replay for decoding in calls._decodings.values())
