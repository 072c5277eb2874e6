"""Coefficients that are never learned: one block moves, and the function is that of K blocks that move alike."""

from __future__ import annotations

import pytest
import torch

from altup import AltUp, FixedAltUp, UserError, upcycle
from altup.models.accounting import account
from altup.models.families import FAMILIES
from altup.nn import coefficient_names
from altup.nn.altup import AltUpUpdate
from tests.models.helpers import batch, hugging_face_llama, hugging_face_t5, tiny, tiny_t5

SELECTIONS = ["alternating", "same", "list"]
FAMILY_NAMES = ["t5", "bert", "decoder"]


def build(family, method="altup", k=2, **fields):
    if fields.get("selection") == "list":
        fields["selection"] = [k - 1, 0, k - 1, 1]
    make = tiny_t5 if family == "t5" else lambda *args, **given: tiny(family, *args, **given)
    return make(method, k=k, coefficients="fixed", **fields)


def as_static(fixed):
    """The static model with the same weights whose P = I and g = 1 do not learn."""
    config = type(fixed.config)(**{**fixed.config.to_dict(), "coefficients": "static"})
    static = type(fixed)(config).to(fixed.dtype)
    missing, unexpected = static.load_state_dict(fixed.state_dict(), strict=False)
    assert all(".rule.updates." in name for name in missing)
    assert not unexpected
    for update in static.modules():
        if isinstance(update, AltUpUpdate):
            assert torch.equal(update.P, torch.eye(len(update.P)))
            assert torch.equal(update.g, torch.ones(len(update.g)))
            update.requires_grad_(False)
    return static.train(fixed.training)


def passes(model, data):
    """Logits, loss, hidden states and the gradients by name."""
    model.zero_grad()
    output = model(**data, output_hidden_states=True)
    output.loss.backward()
    hidden = [value for name, value in output.items() if name.endswith("hidden_states") for value in value]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return output.logits, output.loss, hidden, gradients


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_is_the_static_model_whose_coefficients_do_not_learn(family, k, selection):
    fixed = build(family, k=k, selection=selection).double()
    assert_same(passes(fixed, batch(family)), passes(as_static(fixed), batch(family)))


@pytest.mark.parametrize("method", ["altup+moe", "altup+sequence-altup", "altup+average-pooling"])
def test_with_other_methods(method):
    fixed = build("t5", method, expert_jitter=0.0).double()
    assert_same(passes(fixed, batch()), passes(as_static(fixed), batch()))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_recomputed_layers_and_dropout(family):
    """The same random numbers in the same order: what is dropped of the embeddings stays dropped in all layers."""
    fixed = build(family, k=3, dropout_rate=0.3).double().train()
    static = as_static(fixed)
    results = []
    for model, recomputes in ((fixed, False), (static, False), (fixed, True)):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        results.append(passes(model, batch(family)))
    for got in results[1:]:
        assert_same(got, results[0])


def test_additions_that_are_left_to_the_next_layer_change_nothing(fusing):
    """As layers run on a GPU."""
    model, data = build("t5", k=3).double().train(), batch("t5")

    def run():
        loss = model(**data).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    want = run()
    fusing()
    assert_same(run(), want)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_compiles_without_graph_breaks(family):
    torch._dynamo.reset()
    model, data = build(family, k=3, num_layers=3).double().train(), batch(family)
    want = passes(model, data)
    assert_same(passes(torch.compile(model, fullgraph=True, backend="aot_eager"), data)[:2], want[:2])
    assert_same({name: p.grad for name, p in model.named_parameters()}, want[3])


def test_the_rule_alone():
    """A state of one tensor or of several, predicted and corrected apart or at once; nothing to learn."""
    rule, reference = FixedAltUp(3, 4, [0, 2, 1, 1]).double(), AltUp(3, 4, [0, 2, 1, 1]).double()
    assert not list(rule.parameters())
    assert not rule.state_dict()
    layers = [torch.nn.Linear(8, 8).double() for _ in range(4)]
    embeddings = torch.randn(2, 5, 24, dtype=torch.double)
    want, state = reference.lift(embeddings), rule.lift(embeddings)
    apart, blocks = state, state.unbind(0)
    for index, layer in enumerate(layers):
        want = reference(want, layer, index)
        state, blocks = rule(state, layer, index), rule(blocks, layer, index)
        computed = layer(rule.block(apart, rule.active[index]))
        apart = rule.correct(rule.predict(apart, index), computed, index)
        for got in (state, blocks, apart):
            assert_same(rule.lower(got), reference.lower(want))
    assert isinstance(blocks, tuple)
    one = FixedAltUp(1, 1)
    x = embeddings[..., :8]
    assert torch.equal(one.lower(one(one.lift(x), layers[0], 0)), layers[0](x))


def test_same_selection_adds_nothing_between_layers():
    rule = FixedAltUp(4, 3, "same")
    state = rule.lift(torch.randn(2, 5, 32)).unbind(0)
    for index in range(3):
        new = rule(state, lambda x: x, index)
        assert all(a is b for a, b in zip(new, state, strict=True))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_counted_saved_and_loaded(family, tmp_path):
    model, data = build(family, k=3), batch(family)
    assert not coefficient_names(model)
    assert not [name for name in model.state_dict() if "rule" in name]
    cost = account(model.config)
    assert cost.total == sum(p.numel() for p in model.parameters())
    assert cost.parameters["coefficients"] == cost.flops["update_rule"] == cost.activations["update_rule"] == 0
    assert cost.activation_bytes < account(as_static(model).config).activation_bytes
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[family].model_class.from_pretrained(tmp_path)
    assert loaded.config.coefficients == "fixed"
    with torch.no_grad():
        assert torch.equal(loaded(**data).logits, model(**data).logits)
    half = FAMILIES[family].model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        assert half(**data).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_low_precision_is_near(family):
    model, data = build(family), batch(family)
    with torch.no_grad():
        want = model(**data).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(**data).logits
    assert got.dtype == torch.bfloat16
    real = data["decoder_attention_mask" if family == "t5" else "attention_mask"] != 0
    assert (got.float() - want)[real].abs().median() < 0.03 * want[real].std()


@pytest.mark.parametrize("family", ["t5", "decoder"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_writes_what_the_static_model_writes(family, how):
    fixed = build(family, k=3)
    inputs = {name: batch(family)[name].flip(1) for name in ("input_ids", "attention_mask")}
    if family == "t5":
        inputs = {name: batch(family)[name] for name in inputs}
    want = as_static(fixed).generate(**inputs, max_new_tokens=12, **how)
    assert torch.equal(fixed.generate(**inputs, max_new_tokens=12, **how), want)


@pytest.mark.parametrize("original", [hugging_face_t5, hugging_face_llama])
@pytest.mark.parametrize(("method", "k"), [("altup", 2), ("altup", 3), ("sameup", 2)])
def test_upcycled_it_is_the_dense_model_whose_blocks_part(original, method, k):
    dense = original()
    model, data = (
        upcycle(dense, method, k, coefficients="fixed"),
        batch("t5" if original is hugging_face_t5 else "decoder"),
    )
    with torch.no_grad():
        got, want = model(**data).logits, dense(**data).logits
    real = data.get("decoder_attention_mask", data["attention_mask"]) != 0
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(**data).loss.backward()
        optimizer.step()
    tables = model.get_input_embeddings().weight.detach()[data["input_ids"][2]].chunk(k, dim=-1)
    for i in range(k):
        for j in range(i):
            assert (tables[i] - tables[j]).abs().mean() > 1e-4 * tables[i].abs().mean(), (i, j)


def test_upcycled_blocks_that_nothing_parts_are_refused():
    with pytest.raises(
        UserError, match=r"coefficients='fixed' does not fit num_blocks=3.*layers read 1 of the blocks"
    ):
        upcycle(hugging_face_t5(), "sameup", 3, coefficients="fixed")
    with pytest.raises(UserError, match="coefficients='fixed' does not fit method='recycled'"):
        upcycle(hugging_face_t5(), coefficients="fixed")


@pytest.mark.parametrize(("method", "k", "told"), [("dense", 2, "method='dense'"), ("altup", 1, "num_blocks=1")])
@pytest.mark.parametrize("coefficients", ["fixed", "dynamic"])
def test_coefficients_of_what_stays_dense_are_refused(method, k, told, coefficients):
    """They were dropped without a word."""
    with pytest.raises(UserError, match=f"coefficients='{coefficients}' does not fit {told}"):
        upcycle(hugging_face_llama(), method, k, coefficients=coefficients)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize(("method", "told"), [("dense", "has no coefficients"), ("sum", "has no coefficients"),
                                              ("recycled", "start equal and would stay so")])  # fmt: skip
def test_needs_blocks_that_differ(family, method, told):
    with pytest.raises(UserError, match=f"coefficients='fixed' does not fit widening=.*{told}"):
        FAMILIES[family].config_class.from_preset("tiny", method, coefficients="fixed")
