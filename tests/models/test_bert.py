"""BERT: equal to Hugging Face's where it is dense, exactly upcycled, strided only where every token stays."""

from __future__ import annotations

import pytest
import torch

from altup import AltUpBertConfig, AltUpBertForMaskedLM, upcycle
from altup.models.bert.convert import from_hugging_face, to_hugging_face
from tests.models.helpers import batch, hugging_face_bert, tiny

WIDE = [("recycled", 2), ("recycled", 3), ("altup", 2), ("altup", 3), ("sameup", 4)]


def mixed_batch():
    """Padding on either side, and two token types."""
    data = batch("bert")
    data["attention_mask"][2, :3] = 0
    return {**data, "token_type_ids": torch.randint(0, 2, data["input_ids"].shape)}


@pytest.mark.parametrize("tied", [True, False])
class TestAgainstHuggingFace:
    def test_logits_loss_and_gradients(self, tied):
        theirs, data = hugging_face_bert(tied), mixed_batch()
        ours = from_hugging_face(theirs)
        want, got = theirs(**data), ours(**data)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-5)
        want.loss.backward()
        got.loss.backward()
        for mine, other in (
            (ours.bert.embeddings.positions, theirs.bert.embeddings.position_embeddings),
            (ours.bert.embeddings.token_types, theirs.bert.embeddings.token_type_embeddings),
            (ours.bert.layers[1].attention.k, theirs.bert.encoder.layer[1].attention.self.key),
            (ours.head.transform, theirs.cls.predictions.transform.dense),
            (ours.head.decoder, theirs.cls.predictions.decoder),
        ):
            torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-5)

    def test_conversion_there_and_back_is_lossless(self, tied, tmp_path):
        theirs = hugging_face_bert(tied)
        back = to_hugging_face(from_hugging_face(theirs))
        assert back.state_dict().keys() == theirs.state_dict().keys()
        unused = () if tied else ("cls.predictions.bias",)
        for name, value in theirs.state_dict().items():
            assert name in unused or torch.equal(value, back.state_dict()[name]), name
        back.save_pretrained(tmp_path)
        with torch.no_grad():
            got = type(back).from_pretrained(tmp_path)(**mixed_batch()).logits
            assert torch.equal(got, theirs(**mixed_batch()).logits)

    @pytest.mark.parametrize(("method", "num_blocks"), [*WIDE, ("dense", 2), ("recycled", 1)])
    def test_upcycled_is_the_same_function(self, tied, method, num_blocks):
        theirs, data = hugging_face_bert(tied, num_hidden_layers=4), mixed_batch()
        wide = upcycle(theirs, method, num_blocks)
        assert wide.config.tie_word_embeddings == tied
        with torch.no_grad():
            torch.testing.assert_close(wide(**data).logits, theirs(**data).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "num_blocks"), WIDE)
def test_blocks_part_when_trained(method, num_blocks, monkeypatch):
    model = upcycle(hugging_face_bert(num_hidden_layers=4), method, num_blocks).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    kept, losses = [], []
    for _ in range(20):
        loss = model(**batch("bert")).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    rule = model.bert.rule
    monkeypatch.setattr(rule, "lower", lambda state: (kept.append(state), type(rule).lower(rule, state))[1])
    model(**batch("bert"))
    (end,) = kept
    for i in range(num_blocks):
        for j in range(i):
            assert (end[i] - end[j]).abs().mean() > 1e-3 * end[i].abs().mean(), (i, j)


def test_conversion_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="only a dense BERT fits"):
        to_hugging_face(tiny("bert", "altup"))
    with pytest.raises(ValueError, match="d_kv=4 is not d_model=24"):
        to_hugging_face(tiny("bert", d_kv=4))
    for field, value in (("hidden_act", "relu"), ("is_decoder", True)):
        theirs = hugging_face_bert()
        setattr(theirs.config, field, value)
        with pytest.raises(ValueError, match=field):
            from_hugging_face(theirs)


def test_the_paper_s_light_bert():
    config = AltUpBertConfig.from_preset("light", "altup")
    assert (config.num_layers, config.d_model, config.num_heads) == (12, 256, 4)
    wide, dense = (AltUpBertForMaskedLM(AltUpBertConfig.from_preset("light", m)) for m in ("altup", "dense"))
    extra = wide.num_parameters() - dense.num_parameters()
    # (K − 1)·V·d for the table, as the paper counts, then coefficients, positions, types, two norms, transform.
    small = 12 * 6 + 512 * 256 + 2 * 256 + 4 * 256 + (512 * 512 + 512 - 256 * 256 - 256)
    assert extra == 30522 * 256 + small


def test_texts_longer_than_the_positions_are_refused():
    with pytest.raises(ValueError, match="41 tokens, max_position_embeddings=40"):
        tiny("bert")(torch.zeros(1, 41, dtype=torch.long))


@torch.no_grad()
def test_padding_on_the_left_matters_only_to_strided_layers():
    model, data = tiny("bert", "altup"), batch("bert")
    moved = {name: value.clone() for name, value in data.items()}
    for name in moved:
        moved[name][0] = data[name][0].roll(4)
    places = torch.arange(13).repeat(3, 1)
    places[0] = places[0].roll(4)
    torch.testing.assert_close(model(**moved, position_ids=places).loss, model(**data).loss, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="padding_side"):
        tiny("bert", "sequence-altup")(**moved)


@torch.no_grad()
def test_strided_layers_see_every_fourth_token_with_its_own_mask():
    model, data = tiny("bert", "sequence-altup", num_layers=5), batch("bert")
    kinds = [type(layer).__name__ for layer in model.bert.layers]
    assert kinds == ["BertLayer", *["SequenceAltUp"] * 3, "BertLayer"]
    seen = []
    model.bert.layers[2].layer.register_forward_pre_hook(lambda _, args: seen.append(args))
    model(**data)
    x, mask = seen[0]
    assert x.shape[1] == 4
    assert torch.equal(mask[:, 0, 0] == 0, data["attention_mask"][:, ::4] == 1)


def test_places_of_labels_spare_the_head_and_change_nothing():
    model, data = tiny("bert", "altup", z_loss=0.01), batch("bert", inputs=20)
    data["labels"] = torch.full_like(data["labels"], -100)
    places = torch.stack([torch.randperm(20)[:3].sort().values for _ in range(3)])
    data["labels"].scatter_(1, places, 7)
    want = model(**data)
    seen = []
    model.head.transform.register_forward_hook(lambda _m, _a, out: seen.append(out.shape))
    got = model(**data, masked_positions=places, return_logits=False)
    assert seen == [(3, 3, 48)]
    for name in ("loss", "loss_sum", "nll_sum", "num_correct", "num_tokens"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    assert model(**data, masked_positions=places).logits.shape == (3, 20, 120)


def test_balance_loss_joins_the_loss_in_training_only():
    data = batch("bert")
    with_balance = tiny("bert", "moe", expert_balance=0.5, expert_jitter=0.0)
    without = tiny("bert", "moe", expert_jitter=0.0)
    torch.testing.assert_close(with_balance(**data).loss, without(**data).loss)
    extra = with_balance.train()(**data).loss - without.train()(**data).loss
    assert 0.5 <= extra.item() < 0.5 * 6
