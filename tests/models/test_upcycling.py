from __future__ import annotations

import pytest
import torch

from altup import upcycle, widen
from altup.core.errors import UserError
from altup.models.families import FAMILIES
from altup.models.t5.convert import from_hugging_face
from altup.models.t5.family import T5S
from altup.models.upcycling import load_pretrained
from tests.models.helpers import batch, hugging_face_t5, tiny, tiny_t5
from tests.models.widening.families import build

WIDE = [("recycled", 2), ("recycled", 3), ("altup", 2), ("altup", 4), ("sameup", 2), ("sameup", 4)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("method", "num_blocks"), [*WIDE, ("dense", 2), ("recycled", 1)])
def test_same_function_as_the_original(method, num_blocks, tied):
    original = hugging_face_t5(tied)
    model = upcycle(original, method=method, num_blocks=num_blocks)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).logits, original(**batch()).logits, rtol=0, atol=1e-5)
    inputs = {k: batch()[k] for k in ("input_ids", "attention_mask")}
    for how in ({}, {"num_beams": 4}):
        want = original.generate(**inputs, max_new_tokens=16, **how)
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, **how), want)


@pytest.mark.parametrize("family", ["t5", "bert", "llama"])
def test_a_model_widened_in_another_way_is_refused(family, tmp_path):
    """Its layers alone would convert, and what its coefficients learnt would be gone."""
    model = widen(build(family))
    with pytest.raises(UserError, match=r"was widened by altup.widen.*altup.narrow it first"):
        upcycle(model, "dense")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"was widened by altup.widen, and only altup.load_widened reads it"):
        load_pretrained(str(tmp_path))


def test_other_models_are_sent_to_widen():
    with pytest.raises(UserError, match=r"GPT2LMHeadModel cannot be upcycled.*altup.widen takes others"):
        upcycle(build("gpt2"))


def final_blocks(model):
    """The K blocks that the encoder ends with, before they are lowered."""
    kept = []
    rule = model.encoder.rule
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(rule, "lower", lambda state: (kept.append(state), type(rule).lower(rule, state))[1])
        model.encoder(input_ids=batch()["input_ids"])
    (end,) = kept
    return end


@pytest.mark.parametrize(("method", "num_blocks"), [*WIDE, ("recycled", 4)])
def test_blocks_part_when_trained(method, num_blocks):
    model = upcycle(hugging_face_t5(), method=method, num_blocks=num_blocks)
    start = final_blocks(model)
    for block in start[1:]:
        torch.testing.assert_close(block, start[0], rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _ in range(20):
        loss = model(**batch()).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    end = final_blocks(model.eval())
    for i in range(num_blocks):
        for j in range(i):
            assert (end[i] - end[j]).abs().mean() > 1e-3 * end[i].abs().mean(), (i, j)


def test_from_folders_of_either_kind(tmp_path):
    original = hugging_face_t5()
    original.save_pretrained(tmp_path / "theirs")
    from_hugging_face(original).save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        want = original(**batch()).logits
        for name in ("theirs", "ours"):
            got = upcycle(tmp_path / name, method="altup")(**batch()).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bert", "decoder"])
def test_with_the_same_draws_training_begins_as_the_dense_model_would(family):
    """Dropout of the wide embeddings, and of T5's output, drops the same of every block."""
    dense = tiny_t5("dense", dropout_rate=0.3) if family == "t5" else tiny(family, dropout_rate=0.3)
    outputs = []
    for model in (dense, upcycle(dense, "altup", 2)):
        given = batch(family)  # which seeds
        outputs.append(model.train()(**given).logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_bfloat16_checkpoint_stays_bfloat16_with_float32_coefficients():
    model = upcycle(hugging_face_t5().to(torch.bfloat16), method="altup")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.encoder.rule.updates[0].P.dtype == torch.float32


@pytest.mark.parametrize(("method", "num_blocks"), [("sameup", 4), ("recycled", 5)])
def test_noise_comes_from_the_seed(method, num_blocks):
    original = hugging_face_t5()
    a, b, c = (upcycle(original, method, num_blocks, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.encoder.rule.updates[0].P, b.encoder.rule.updates[0].P)
    assert not torch.equal(a.encoder.rule.updates[0].P, c.encoder.rule.updates[0].P)


def test_clear_errors(tmp_path):
    with pytest.raises(ValueError, match="method='sum'"):
        upcycle(hugging_face_t5(), method="sum")
    with pytest.raises(ValueError, match="num_blocks=0"):
        upcycle(hugging_face_t5(), num_blocks=0)
    with pytest.raises(ValueError, match="widened already"):
        upcycle(tiny_t5("altup"))
    with pytest.raises(ValueError, match="Linear cannot be upcycled"):
        upcycle(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no-such-folder"):
        upcycle(str(tmp_path / "no-such-folder"))


def test_recycled_is_exact_for_any_epsilon():
    original = hugging_face_t5(layer_norm_epsilon=1e-2)
    with torch.no_grad():
        got = upcycle(original, "recycled", 4)(**batch()).logits
        torch.testing.assert_close(got, original(**batch()).logits, rtol=0, atol=1e-5)


def test_nothing_is_shared_with_the_original():
    ours = from_hugging_face(hugging_face_t5()).train()
    for method in ("dense", "recycled"):
        copy = upcycle(ours, method)
        copy.generation_config.max_length = 7
        assert ours.generation_config.max_length != 7
        assert copy is not ours
        assert not copy.training
    assert ours.training


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path):
    original = hugging_face_t5()
    kept = {n: v for n, v in original.state_dict().items() if "decoder.block.1." not in n}
    original.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ValueError, match="not whole"):
        upcycle(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        upcycle(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(original.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        upcycle(tmp_path)


def test_tools_for_one_family_refuse_the_others(tmp_path):
    tiny("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a 'altup_bert' model; give one of t5, altup_t5"):
        load_pretrained(str(tmp_path), only=T5S)


def test_a_model_that_is_not_finite_is_refused():
    model = hugging_face_t5()
    with torch.no_grad():
        model.encoder.block[1].layer[0].layer_norm.weight[3] = torch.nan
    for call in (upcycle, widen):
        with pytest.raises(UserError, match=r"block.1.layer.0.layer_norm.weight .* not finite"):
            call(model)


def test_a_model_whose_logits_are_not_finite_is_refused():
    """All weights are finite, and what they compute is not."""
    model = hugging_face_t5()
    with torch.no_grad():
        model.shared.weight.mul_(3e38 / model.shared.weight.abs().max())
        model.lm_head.weight.mul_(3e38)
    for call in (upcycle, widen):
        with pytest.raises(UserError, match="computes something else"):
            call(model)


@pytest.mark.parametrize("scale", [1.01, -1.0])
def test_an_upcycled_model_that_computes_something_else_is_refused(scale, monkeypatch):
    """The last comparison, whatever went wrong before: a hundredth more, or another function altogether."""
    convert = FAMILIES["t5"].convert

    def wrong(model):
        converted = convert(model)
        with torch.no_grad():
            converted.lm_head.weight.mul_(scale)
        return converted

    monkeypatch.setattr(FAMILIES["t5"], "convert", wrong, raising=False)
    with pytest.raises(UserError, match="upcycled, this T5ForConditionalGeneration computes something else"):
        upcycle(hugging_face_t5())


def test_odd_shapes_are_compared_too():
    for model in (
        tiny("bert", max_position_embeddings=9),
        tiny("bert", vocab_size=3, pad_token_id=0),
        tiny("decoder", vocab_size=2, pad_token_id=0, eos_token_id=1, bos_token_id=1),
    ):
        upcycle(model)
    headless = hugging_face_t5()
    torch.nn.init.zeros_(headless.lm_head.weight)
    upcycle(headless)
