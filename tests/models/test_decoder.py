"""The decoder: equal to Llama where it is dense, never looking ahead, the same with a cache as without."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

from altup import upcycle
from altup.models.decoder.convert import from_hugging_face, to_hugging_face
from tests.models.helpers import DECODERS, VOCABULARY, batch, hugging_face_llama, tiny

METHODS = [method for _, method in DECODERS]
WIDE = [("recycled", 2), ("recycled", 3), ("altup", 2), ("altup", 3), ("sameup", 4)]


def left_padded():
    data = batch("decoder")
    return {name: value.flip(1) for name, value in data.items() if name != "labels"}


@pytest.mark.parametrize("tied", [False, True])
class TestAgainstLlama:
    def test_logits_loss_and_gradients(self, tied):
        theirs, data = hugging_face_llama(tied), batch("decoder")
        ours = from_hugging_face(theirs)
        want, got = theirs(**data), ours(**data)
        real = data["attention_mask"].bool()
        torch.testing.assert_close(got.logits[real], want.logits[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-5)
        want.loss.backward()
        got.loss.backward()
        for mine, other in (
            (ours.model.embed_tokens, theirs.model.embed_tokens),
            (ours.model.layers[1].attention.k, theirs.model.layers[1].self_attn.k_proj),
            (ours.model.layers[2].feed_forward.gate, theirs.model.layers[2].mlp.gate_proj),
            (ours.lm_head, theirs.lm_head),
        ):
            torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def test_left_padding(self, tied):
        theirs, data = hugging_face_llama(tied), left_padded()
        real = data["attention_mask"].bool()
        want, got = theirs(**data).logits, from_hugging_face(theirs)(**data).logits
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=2e-5)

    @pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
    def test_generate(self, tied, how):
        theirs = hugging_face_llama(tied)
        want = theirs.generate(**left_padded(), max_new_tokens=12, do_sample=False, **how)
        got = from_hugging_face(theirs).generate(**left_padded(), max_new_tokens=12, do_sample=False, **how)
        assert torch.equal(got, want)

    def test_conversion_there_and_back_is_lossless(self, tied, tmp_path):
        theirs = hugging_face_llama(tied, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
        back = to_hugging_face(from_hugging_face(theirs))
        assert back.state_dict().keys() == theirs.state_dict().keys()
        for name, value in theirs.state_dict().items():
            assert torch.equal(value, back.state_dict()[name]), name
        back.save_pretrained(tmp_path)
        with torch.no_grad():
            got = type(back).from_pretrained(tmp_path)(**batch("decoder")).logits
            assert torch.equal(got, theirs(**batch("decoder")).logits)

    @pytest.mark.parametrize(("method", "num_blocks"), [*WIDE, ("dense", 2)])
    def test_upcycled_is_the_same_function(self, tied, method, num_blocks):
        theirs, data = hugging_face_llama(tied, num_hidden_layers=4), batch("decoder")
        wide = upcycle(theirs, method, num_blocks)
        assert wide.config.tie_word_embeddings == tied
        real = data["attention_mask"].bool()
        with torch.no_grad():
            got, want = wide(**data).logits[real], theirs(**data).logits[real]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        want = theirs.generate(**left_padded(), max_new_tokens=8, do_sample=False)
        assert torch.equal(wide.generate(**left_padded(), max_new_tokens=8, do_sample=False), want)


def test_conversion_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="only a dense decoder fits"):
        to_hugging_face(tiny("decoder", "recycled"))
    with pytest.raises(ValueError, match=r"dropout_rate=0\.1"):
        to_hugging_face(tiny("decoder", dropout_rate=0.1))
    with pytest.raises(ValueError, match="attention_bias=True"):
        from_hugging_face(hugging_face_llama(attention_bias=True))
    stretched = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rope_type='linear'"):
        from_hugging_face(hugging_face_llama(rope_parameters=stretched))


@pytest.mark.parametrize("method", METHODS)
class TestEveryMethod:
    @torch.no_grad()
    def test_never_looks_ahead(self, method):
        model, ids = tiny("decoder", method), batch("decoder")["input_ids"]
        before = model(ids).logits
        ids[:, 6:] = torch.randint(3, VOCABULARY, (3, 7))
        after = model(ids).logits
        torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=1e-5)
        assert not torch.allclose(after[:, 6:], before[:, 6:])

    @torch.no_grad()
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_cached_generation_is_step_by_step_generation(self, method, cache):
        """Against whole forward passes without any cache, one row at a time and without padding."""
        model, data = tiny("decoder", method), left_padded()
        model.generation_config.eos_token_id = None
        got = model.generate(**data, max_new_tokens=9, do_sample=False, cache_implementation=cache)
        for row in range(3):
            tokens = data["input_ids"][row : row + 1][:, data["attention_mask"][row] == 1]
            for _ in range(9):
                logits = model(tokens, use_cache=False).logits[:, -1]
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
            assert torch.equal(got[row, -9:], tokens[0, -9:])

    @torch.no_grad()
    def test_left_padding_changes_nothing(self, method):
        model, data = tiny("decoder", method), left_padded()
        together = model(**data).logits
        for row in range(3):
            real = data["attention_mask"][row] == 1
            alone = model(data["input_ids"][row : row + 1, real]).logits[0]
            torch.testing.assert_close(together[row, real], alone, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_given_by_hand_is_read(static):
    model, data = tiny("decoder", "altup"), left_padded()
    whole = model(**data).logits
    cache = StaticCache(config=model.config, max_cache_len=20) if static else None
    ids, mask = data["input_ids"], data["attention_mask"]
    first = model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True)
    rest = model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    real = mask[:, 5:] == 1
    torch.testing.assert_close(rest.logits[real], whole[:, 5:][real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_step_with_a_static_cache_is_compiled_once():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, ids = tiny("decoder", "altup"), batch("decoder")["input_ids"]
    whole = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=20)
    model(ids[:, :5], past_key_values=cache, use_cache=True)
    step = torch.compile(model, fullgraph=True, backend=counter)
    for i in range(5, 9):
        got = step(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(got[:, 0], whole[:, i], rtol=0, atol=1e-5)
    assert counter.frame_count == 1


def test_both_kinds_of_labels():
    """`labels` are shifted by the model, `shift_labels` were shifted by whoever gives them."""
    model, data = tiny("decoder", "altup"), batch("decoder")
    shifted = torch.full_like(data["labels"], -100)
    shifted[:, :-1] = data["labels"][:, 1:]
    inputs = {name: data[name] for name in ("input_ids", "attention_mask")}
    by_labels, by_shifted = model(**data), model(**inputs, shift_labels=shifted)
    torch.testing.assert_close(by_shifted.loss, by_labels.loss)
    assert by_shifted.num_tokens == by_labels.num_tokens == (data["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(model(**data, shift_labels=shifted).loss, by_labels.loss)
    shifted[:, -1] = 7  # the token after the last one: only shifted labels can ask for it
    assert model(**inputs, shift_labels=shifted).num_tokens == by_labels.num_tokens + 3
    with pytest.raises(ValueError, match="one label a token"):
        model(**inputs, shift_labels=shifted[:, :5])


def test_no_cache_is_made_while_training():
    model, data = tiny("decoder", "altup"), batch("decoder")
    assert model(**data).past_key_values is None
    assert model.train()(data["input_ids"]).past_key_values is None
    assert model.eval()(data["input_ids"]).past_key_values is not None


@torch.no_grad()
def test_logits_to_keep():
    model, ids = tiny("decoder", "recycled"), batch("decoder")["input_ids"]
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:])


def test_only_the_shared_heads_are_cached():
    model = tiny("decoder", "altup")
    cache = model(batch("decoder")["input_ids"]).past_key_values
    assert cache.layers[0].keys.shape == (3, 2, 13, 8)


def test_sampling_is_reproducible():
    model, runs = tiny("decoder", "recycled"), []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(model.generate(**left_padded(), do_sample=True, max_new_tokens=10))
    assert torch.equal(*runs)
