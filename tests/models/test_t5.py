"""What a T5 of any method must do: equal Hugging Face where it is dense, never look ahead, ignore padding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import altup.models
from altup import AltUpT5Config, AltUpT5EncoderModel, AltUpT5ForConditionalGeneration
from altup.kernels.attention import lay_out
from altup.models.t5.convert import from_hugging_face, to_hugging_face
from tests.models.helpers import ALL_METHODS, SHAPE, VOCABULARY, batch, hugging_face_t5, tiny_t5


def as_altup_with_one_block(dense):
    config = AltUpT5Config(**{**dense.config.to_dict(), "widening": "altup", "num_blocks": 1})
    model = AltUpT5ForConditionalGeneration(config).eval()
    model.load_state_dict(dense.state_dict())
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("one_block", [False, True])
class TestAgainstHuggingFace:
    def models(self, tied, one_block):
        theirs = hugging_face_t5(tied)
        ours = from_hugging_face(theirs)
        return theirs, as_altup_with_one_block(ours) if one_block else ours

    @torch.no_grad()
    def test_logits_and_loss(self, tied, one_block):
        theirs, ours = self.models(tied, one_block)
        want, got = theirs(**batch()), ours(**batch())
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_gradients(self, tied, one_block):
        theirs, ours = self.models(tied, one_block)
        with torch.enable_grad():
            theirs(**batch()).loss.backward()
            ours(**batch()).loss.backward()
        torch.testing.assert_close(
            ours.encoder.relative_bias.weight.grad,
            theirs.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad,
            rtol=1e-4,
            atol=1e-6,
        )
        torch.testing.assert_close(
            ours.encoder.embed_tokens.weight.grad, theirs.shared.weight.grad, rtol=1e-4, atol=1e-5
        )

    @pytest.mark.parametrize("how", [{}, {"num_beams": 4}, {"cache_implementation": "static"}])
    def test_generate(self, tied, one_block, how):
        theirs, ours = self.models(tied, one_block)
        inputs = {k: batch()[k] for k in ("input_ids", "attention_mask")}
        want = theirs.generate(**inputs, max_new_tokens=20, **how)
        assert torch.equal(ours.generate(**inputs, max_new_tokens=20, **how), want)


@pytest.mark.parametrize("tied", [False, True])
def test_conversion_there_and_back_is_lossless(tied, tmp_path):
    theirs = hugging_face_t5(tied)
    back = to_hugging_face(from_hugging_face(theirs))
    assert theirs.state_dict().keys() == back.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name
    assert back.config.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    back.save_pretrained(tmp_path)
    loaded = type(back).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch()).logits, theirs(**batch()).logits, rtol=0, atol=0)


def test_conversion_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="num_blocks=2"):
        to_hugging_face(tiny_t5("altup"))
    first_version = hugging_face_t5()
    first_version.config.feed_forward_proj = "relu"
    with pytest.raises(ValueError, match="gated-gelu"):
        from_hugging_face(first_version)


@torch.no_grad()
def test_labels_alone_are_shifted_as_hugging_face_shifts_them():
    """Teacher forcing: the decoder reads the labels behind the start token."""
    theirs = hugging_face_t5()
    data = {name: value for name, value in batch().items() if not name.startswith("decoder")}
    ours = from_hugging_face(theirs)(**data)
    torch.testing.assert_close(ours.logits, theirs(**data).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs(**data).loss)


@pytest.mark.parametrize("method", ALL_METHODS)
class TestEveryMethod:
    @torch.no_grad()
    def test_decoder_never_looks_ahead(self, method):
        model, data = tiny_t5(method), batch()
        del data["labels"], data["decoder_attention_mask"]
        before = model(**data).logits
        data["decoder_input_ids"][:, 4:] = torch.randint(3, VOCABULARY, (3, 3))
        after = model(**data).logits
        torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-5)
        assert not torch.allclose(after[:, 4:], before[:, 4:])

    @torch.no_grad()
    @pytest.mark.parametrize("more", [1, 3, 8])
    def test_padding_changes_nothing_at_real_positions(self, method, more):
        model, data = tiny_t5(method), batch()
        before = model(**data)
        rows = data["input_ids"].shape[0]
        junk = torch.randint(3, VOCABULARY, (rows, more))
        none = torch.zeros(rows, more, dtype=torch.long)
        longer = {
            "input_ids": torch.cat([data["input_ids"], junk], 1),
            "attention_mask": torch.cat([data["attention_mask"], none], 1),
            "decoder_input_ids": torch.cat([data["decoder_input_ids"], junk], 1),
            "decoder_attention_mask": torch.cat([data["decoder_attention_mask"], none], 1),
            "labels": torch.cat([data["labels"], none - 100], 1),
        }
        after = model(**longer)
        real = data["decoder_attention_mask"].bool()
        torch.testing.assert_close(after.logits[:, :7][real], before.logits[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(after.loss, before.loss, rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_one_row_does_not_see_another(self, method):
        model, data = tiny_t5(method), batch()
        together = model(**data).logits
        for row in range(3):
            alone = model(**{k: v[row : row + 1] for k, v in data.items()}).logits
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)

    @torch.no_grad()
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_cached_generation_is_step_by_step_generation(self, method, cache):
        """Against whole forward passes without any cache, one for each new token."""
        model, data = tiny_t5(method), batch()
        inputs = {k: data[k] for k in ("input_ids", "attention_mask")}
        tokens = torch.zeros(3, 1, dtype=torch.long)
        for _ in range(9):
            logits = model(**inputs, decoder_input_ids=tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
        model.generation_config.eos_token_id = None
        got = model.generate(**inputs, max_new_tokens=9, cache_implementation=cache)
        assert torch.equal(got, tokens)

    def test_gradients_reach_every_parameter(self, method):
        model = tiny_t5(method).train()
        model(**batch()).loss.backward()
        without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert [n for n in without if "experts" not in n] == []  # an expert may be chosen by no token

    def test_gradient_checkpointing_gives_the_same_gradients(self, method):
        gradients = []
        for checkpointing in (False, True):
            model = tiny_t5(method, expert_jitter=0.0).train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            model(**batch()).loss.backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        for name, want in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], want)

    def test_disk_and_auto_classes(self, method, tmp_path):
        model = tiny_t5(method)
        model.save_pretrained(tmp_path)
        assert [f.name for f in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
        loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        assert type(loaded) is AltUpT5ForConditionalGeneration
        for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
        assert AutoConfig.from_pretrained(tmp_path).to_dict().items() >= {"model_type": "altup_t5"}.items()
        encoder = AutoModel.from_pretrained(tmp_path)
        assert type(encoder) is AltUpT5EncoderModel
        data = {k: batch()[k] for k in ("input_ids", "attention_mask")}
        with torch.no_grad():
            want = model.encoder(**data).last_hidden_state
            assert torch.equal(encoder(**data).last_hidden_state, want)

    def test_half_precision_keeps_coefficients_through_disk(self, method, tmp_path):
        model = tiny_t5(method)
        wide = {n: p.clone() for n, p in model.named_parameters() if is_coefficient(n)}
        model.to(torch.bfloat16).save_pretrained(tmp_path)
        loaded = AltUpT5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == (torch.float32 if is_coefficient(name) else torch.bfloat16), name
            if name in wide:
                assert torch.equal(parameter, wide[name])
        assert loaded.dtype == model.dtype == torch.bfloat16
        assert AltUpT5ForConditionalGeneration.from_pretrained(tmp_path).lm_head.weight.dtype == torch.bfloat16

    @torch.no_grad()
    def test_bfloat16_agrees_with_float32(self, method):
        model, data = tiny_t5(method), batch()
        want = model(**data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = model(**data)
        got = model.to(torch.bfloat16)(**data)
        real = data["decoder_attention_mask"].bool()
        for half in (cast, got):
            assert half.logits.dtype == torch.bfloat16
            error = (half.logits.float() - want.logits)[real].abs()
            # The median, because a token near a border may change its expert.
            assert error.median() < 0.03 * want.logits[real].std()
        if "moe" not in method:
            torch.testing.assert_close(got.loss, want.loss, rtol=0.01, atol=0.02)


def is_coefficient(name):
    return any(part in name for part in (".rule.", ".update.", ".router."))


@pytest.mark.parametrize("method", ["sequence-altup", "stride-and-skip", "average-pooling"])
def test_left_padding_is_refused_where_it_would_matter(method):
    data = batch()
    data["attention_mask"] = data["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="padding_side"):
        tiny_t5(method)(**data)


@torch.no_grad()
def test_left_padding_is_harmless_to_the_others():
    model, data = tiny_t5("altup"), batch()
    want = model(**data).logits
    for key in ("input_ids", "attention_mask"):
        data[key][0] = data[key][0].roll(4)
    torch.testing.assert_close(model(**data).logits, want, rtol=0, atol=1e-5)


def test_strided_layers_are_the_inner_ones_at_their_original_places():
    """The kept tokens attend with the bias of their true distances."""
    model = tiny_t5("sequence-altup", num_layers=5)
    kinds = [type(layer).__name__ for layer in model.encoder.layers]
    assert kinds == ["T5Layer", *["SequenceAltUp"] * 3, "T5Layer"]
    seen = {}
    for index, layer in enumerate(model.encoder.layers):
        inner = getattr(layer, "layer", layer)
        inner.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args}))
    model(**batch(inputs=14))
    full = lay_out(model.encoder.relative_bias(14, 14), 14, 14)[:, :, ::4, ::4]
    x, bias, keys = seen[2]
    assert x.shape[1] == 4
    torch.testing.assert_close(lay_out(bias, 4, 4), full)
    torch.testing.assert_close(keys.key_segments.bool(), batch(inputs=14)["attention_mask"][:, ::4].bool())
    assert seen[0][0].shape[1] == 14


def test_fresh_model_starts_near_the_uniform_guess():
    for method in ALL_METHODS:
        config = AltUpT5Config.from_preset("tiny", method, vocab_size=1000)
        torch.manual_seed(0)
        model = AltUpT5ForConditionalGeneration(config)
        ids = torch.randint(0, 1000, (4, 40))
        with torch.no_grad():
            loss = model(input_ids=ids, labels=torch.randint(0, 1000, (4, 40))).loss.item()
        assert 6.5 < loss < 8.2, (method, loss)  # ln 1000 = 6.9, and half a nat for logits of variance 1


def test_initial_values_by_fan_in():
    torch.manual_seed(0)
    model = AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("small", "altup", vocab_size=2000))
    layer = model.decoder.layers[0]
    for parameter, std in [
        (model.encoder.embed_tokens.weight, 1.0),
        (model.lm_head.weight, 1024**-0.5),
        (layer.attention.q.weight, (512 * 64) ** -0.5),
        (layer.attention.k.weight, 512**-0.5),
        (layer.cross_attention.v.weight, 1024**-0.5),
        (layer.cross_attention.o.weight, 512**-0.5),
        (layer.feed_forward.wi_1.weight, 512**-0.5),
        (layer.feed_forward.wo.weight, 2048**-0.5),
    ]:
        assert parameter.std().item() == pytest.approx(std, rel=0.02)
    assert torch.equal(model.encoder.rule.updates[1].P, torch.eye(2))
    assert torch.equal(model.encoder.rule.updates[1].g, torch.ones(2))


def test_missing_weights_are_initialised_and_loaded_ones_kept(tmp_path):
    model = tiny_t5("altup")
    model.save_pretrained(tmp_path)
    deeper = AltUpT5Config.from_preset("tiny", "altup", **{**SHAPE, "num_layers": 5})
    with pytest.raises(ValueError, match=r"num_layers=5 where the checkpoint has 4"):
        AltUpT5ForConditionalGeneration.from_pretrained(tmp_path, config=deeper)
    loaded = AltUpT5ForConditionalGeneration.from_pretrained(tmp_path, config=deeper, ignore_mismatched_sizes=True)
    assert torch.equal(loaded.encoder.rule.updates[0].P, model.encoder.rule.updates[0].P)
    assert torch.equal(loaded.encoder.rule.updates[4].P, torch.eye(2))
    assert loaded.encoder.layers[4].attention.k.weight.std().item() == pytest.approx(24**-0.5, rel=0.2)


def test_checkpoint_of_another_shape_is_refused(tmp_path):
    tiny_t5("altup").save_pretrained(tmp_path)
    other = AltUpT5Config.from_preset("tiny", "altup", k=4, **SHAPE)
    with pytest.raises(ValueError, match=r"num_blocks=4 where the checkpoint has 2"):
        AltUpT5ForConditionalGeneration.from_pretrained(tmp_path, config=other)


def test_loss_pieces_add_up():
    model, data = tiny_t5("altup", z_loss=0.01), batch()
    whole = model(**data, return_logits=False)
    assert whole.logits is None
    assert whole.num_tokens == (data["labels"] != -100).sum()
    torch.testing.assert_close(whole.loss, whole.loss_sum / whole.num_tokens)
    assert whole.loss_sum > whole.nll_sum
    parts = [model(**{k: v[i : i + 1] for k, v in data.items()}) for i in range(3)]
    torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum)
    given = model(**data, num_items_in_batch=100).loss
    torch.testing.assert_close(given, whole.loss_sum / 100)


def test_hidden_states_and_tuples():
    model, data = tiny_t5("altup"), batch()
    output = model(**data, output_hidden_states=True)
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 5
    assert output.encoder_hidden_states[0].shape == (3, 13, 48)
    assert torch.equal(model(**data, return_dict=False)[1], output.logits)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**data, output_attentions=True)


def test_extra_layers_and_unequal_depths():
    config = AltUpT5Config.from_preset("large", "dense", extra_layers=4)
    assert (config.num_layers, config.num_decoder_layers) == (28, 28)
    assert AltUpT5Config(**config.to_dict()).num_layers == 28
    model = tiny_t5("altup", num_layers=2, num_decoder_layers=5)
    ids = batch()["input_ids"]
    assert torch.equal(
        model.generate(ids, max_new_tokens=8), model.generate(ids, max_new_tokens=8, use_cache=False)
    )


def test_balance_loss_joins_the_loss_in_training_only():
    data = batch()
    with_balance = tiny_t5("moe", expert_balance=0.5, expert_jitter=0.0)
    without = tiny_t5("moe", expert_jitter=0.0)
    torch.testing.assert_close(with_balance(**data).loss, without(**data).loss)
    extra = with_balance.train()(**data).loss - without.train()(**data).loss
    assert 0.5 <= extra.item() < 0.5 * 6


def test_sampling_is_reproducible():
    model, ids = tiny_t5("recycled"), batch()["input_ids"]
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(model.generate(ids, do_sample=True, max_new_tokens=10))
    assert torch.equal(*runs)
    assert altup.models.AltUpT5Config.model_type == "altup_t5"


@torch.no_grad()
def test_masks_of_queries_and_keys():
    """Newer versions of `generate` pass whole masks, of truth or to be added."""
    model, data = tiny_t5("altup"), batch()
    seen = data["decoder_attention_mask"].bool()[:, None, None, :] & torch.ones(7, 7).tril().bool()
    got = model(**{**data, "decoder_attention_mask": seen}).logits
    torch.testing.assert_close(got, model(**data).logits, rtol=0, atol=1e-5)
    seen[2, :, 3:, 1] = False
    want = model(**{**data, "decoder_attention_mask": seen}).logits
    for mask in (seen.int(), torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
        got = model(**{**data, "decoder_attention_mask": mask}).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_whole_masks_train_under_checkpointing(use_reentrant):
    data = batch()
    seen = data["decoder_attention_mask"].bool()[:, None, None, :] & torch.ones(7, 7).tril().bool()
    plain, checkpointed = (tiny_t5("altup").train() for _ in range(2))
    plain(**data).loss.backward()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed.enable_input_require_grads()
    checkpointed(**{**data, "decoder_attention_mask": seen}).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", ["whole", "plain"])
def test_a_cache_given_by_hand_is_read(use_cache, kind):
    model, data = tiny_t5("altup"), batch()
    del data["labels"], data["decoder_attention_mask"]
    whole = model(**data).logits
    first = model(**{**data, "decoder_input_ids": data["decoder_input_ids"][:, :4]}, use_cache=True)
    cache = first.past_key_values if kind == "whole" else first.past_key_values.self_attention_cache
    rest = model(
        encoder_outputs=(first.encoder_last_hidden_state,),
        attention_mask=data["attention_mask"],
        decoder_input_ids=data["decoder_input_ids"][:, 4:],
        past_key_values=cache,
        use_cache=use_cache,
    )
    torch.testing.assert_close(rest.logits, whole[:, 4:], rtol=0, atol=1e-5)


def test_a_mask_of_another_length_is_refused():
    model, data = tiny_t5("altup"), batch()
    memory = model.encoder(data["input_ids"])
    mask = data.pop("attention_mask")
    with pytest.raises(ValueError, match="5 long for 13 tokens"):
        model(**data, attention_mask=mask[:, :5])
    for use_cache in (True, False):
        with pytest.raises(ValueError, match="1 long for 13 tokens"):
            model(**data, attention_mask=mask[:, :1], encoder_outputs=memory, use_cache=use_cache)
    with pytest.raises(ValueError, match=r"\[3, 13, 13\]"):
        model(**data, attention_mask=mask[:, None].expand(-1, 13, -1))


@torch.no_grad()
def test_pooled_memory_takes_the_mask_of_either_length():
    model, data = tiny_t5("average-pooling"), batch()
    want = model(**data).logits
    encoded = model.encoder(data.pop("input_ids"), data["attention_mask"])
    assert torch.equal(model(**data, encoder_outputs=encoded).logits, want)
    data["attention_mask"] = model.encoder.output_mask(data["attention_mask"])
    assert torch.equal(model(**data, encoder_outputs=encoded).logits, want)


def test_balance_loss_leaves_nothing_behind_and_refuses_reentrant_checkpointing():
    model = tiny_t5("moe", expert_balance=0.1).train()
    model(**batch()).loss.backward()
    copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch()).loss.backward()
    copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(**batch())
    model.gradient_checkpointing_disable()
    model.requires_grad_(False).lm_head.requires_grad_(True)
    model(**batch()).loss.backward()


def test_conversion_keeps_the_start_token():
    theirs = hugging_face_t5()
    theirs.generation_config.decoder_start_token_id, theirs.config.pad_token_id = 0, 3
    assert from_hugging_face(theirs).config.decoder_start_token_id == 0
    theirs.generation_config.decoder_start_token_id, theirs.config.decoder_start_token_id = None, 5
    assert from_hugging_face(theirs).config.decoder_start_token_id == 5


def test_encoder_folder_is_not_a_whole_model(tmp_path):
    AltUpT5EncoderModel(tiny_t5("altup").config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not that of a AltUpT5ForConditionalGeneration"):
        AltUpT5ForConditionalGeneration.from_pretrained(pretrained_model_name_or_path=tmp_path)


@pytest.mark.parametrize("method", ["dense", "altup", "recycled"])
def test_tokens_of_a_sequence_lose_the_same(method):
    """Equal tokens without a bias by distance stay equal through all layers, whatever is dropped, if all tokens of
    a sequence lose the same; sequences differ."""
    tokens = torch.full((2, 6), 5)
    for shared in (True, False):
        model = tiny_t5(method, dropout_rate=0.3, sequence_dropout=shared).train()
        torch.nn.init.zeros_(model.encoder.relative_bias.weight)
        torch.manual_seed(0)
        with torch.no_grad():
            out = model.encoder(input_ids=tokens)[0]
        spread = (out - out[:, :1]).abs().amax()
        assert (spread < 1e-5) == shared
        assert (out[0] - out[1]).abs().amax() > 0.1
        with torch.no_grad():
            assert torch.equal(*(model.eval().encoder(input_ids=tokens)[0] for _ in range(2)))


def test_what_dropout_shares_is_kept_with_the_model(tmp_path):
    tiny_t5("dense", dropout_rate=0.1, sequence_dropout=True).save_pretrained(tmp_path)
    model = AltUpT5ForConditionalGeneration.from_pretrained(tmp_path)
    assert model.encoder.layers[0].per_sequence
    assert model.decoder.layers[0].cross_attention.per_sequence
