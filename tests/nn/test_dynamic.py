"""Data-dependent coefficients against Hugging Face's Gemma 3n module and against the formulas written out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp

from altup.nn import AltUp, DynamicAltUp
from altup.nn.dynamic import DynamicUpdate


def gemma(K=4, d=16, active=0, clip=120.0, scale=0.5):
    """Gemma's own module with weights that matter."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        hidden_size=d, altup_num_inputs=K, altup_active_idx=active, altup_coef_clip=clip, rms_norm_eps=1e-5
    )
    module = Gemma3nTextAltUp(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
        module.modality_router.weight.mul_(d)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "active"), [(2, 0), (2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("training", [False, True])
def test_equals_gemma(K, active, dtype, training):
    """Prediction, correction and both at once; in training with a clip that bites."""
    theirs = gemma(K, active=active, clip=0.4).to(dtype).train(training)
    ours = DynamicUpdate.from_gemma3n(theirs)
    state = torch.randn(K, 2, 5, 16, dtype=dtype)
    y = torch.randn(2, 5, 16, dtype=dtype)
    predicted = theirs.predict(state)
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-5 if dtype == torch.float32 else 0.05)
    expected = theirs.correct(predicted, y)
    torch.testing.assert_close(ours.predict(state), predicted, **tolerance)
    torch.testing.assert_close(ours.correct(predicted, y), expected, **tolerance)
    torch.testing.assert_close(ours(state, y), expected, **tolerance)
    as_tuple = ours(state.unbind(0), y)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(torch.stack(as_tuple), expected, **tolerance)


def test_clip_bites():
    theirs = gemma(clip=0.1).train()
    ours = DynamicUpdate.from_gemma3n(theirs)
    state, y = torch.randn(4, 1, 3, 16), torch.randn(1, 3, 16)
    assert not torch.allclose(ours(state, y), ours.eval()(state, y))


def test_gradients_equal_gemmas_where_the_clip_bites():
    """A is clipped for good and learns on, C where it is read; and two passes may come before one backward."""
    theirs = gemma(3, active=1, clip=0.1).train()
    ours = DynamicUpdate.from_gemma3n(theirs)
    state, y = torch.randn(3, 2, 5, 16), torch.randn(2, 5, 16)
    weights = torch.randn_like(state)
    for _ in range(2):
        (theirs.correct(theirs.predict(state), y) * weights).sum().backward()
    sum((ours.correct(ours.predict(state), y) * weights).sum() for _ in range(2)).backward()
    for mine, other in (
        (ours.A, theirs.prediction_coefs),
        (ours.C, theirs.correction_coefs),
        (ours.R, theirs.modality_router),
        (ours.norm, theirs.router_norm),
    ):
        torch.testing.assert_close(mine.grad, other.weight.grad.view_as(mine), rtol=1e-4, atol=1e-5)
    assert (ours.A.grad != 0).all()
    torch.testing.assert_close(ours.eval().predict(state), theirs.eval().predict(state), rtol=1e-5, atol=1e-5)


def test_the_clip_compiles_whole():
    torch._dynamo.reset()
    update, state = DynamicUpdate.from_gemma3n(gemma(2, clip=0.1).train()), torch.randn(2, 1, 3, 16)
    expected = copy.deepcopy(update)(state, state[0])
    compiled = torch.compile(update, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(state, state[0]), expected, rtol=1e-5, atol=1e-5)
    assert update.A.abs().max() <= 0.1


def test_a_stack_fed_with_predictions_is_gemmas():
    """Gemma's order (predict, layer on the predicted block, correct) over three layers."""
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    theirs = [gemma(3, active=1) for _ in layers]
    rule = DynamicAltUp(3, 3, 16, [1, 1, 1], feed="predicted")
    rule.updates = torch.nn.ModuleList([DynamicUpdate.from_gemma3n(module) for module in theirs])
    state = expected = torch.randn(3, 2, 4, 16)
    for i, layer in enumerate(layers):
        predicted = theirs[i].predict(expected)
        expected = theirs[i].correct(predicted, layer(predicted[1]))
        state = rule(state, layer, i)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def test_old_block_token_by_token():
    """The paper's order with coefficients a token, written out with loops in float64."""
    K, d = 3, 8
    torch.manual_seed(1)
    rule = DynamicAltUp(K, 2, d, [0, 2]).double()
    update = rule.updates[1]
    with torch.no_grad():
        for parameter in rule.parameters():
            parameter.add_(torch.randn_like(parameter))
    layer = torch.nn.Linear(d, d).double()
    state = torch.randn(K, 1, 4, d, dtype=torch.float64)
    y = layer(state[2]).detach()
    update.requires_grad_(False)

    def modality(x):
        norm = x / math.sqrt(float((x**2).mean()) + 1e-6) * update.norm
        return [math.tanh(float(update.R[m] @ norm) / d) for m in range(K)]

    expected = torch.empty_like(state)
    for t in range(4):
        m, n = modality(state[2, 0, t]), modality(y[0, t])
        P = [
            [(i == j) + sum(float(update.A[i, j, a]) * m[a] for a in range(K)) for j in range(K)] for i in range(K)
        ]
        g = [1 + sum(float(update.C[i, a]) * n[a] for a in range(K)) for i in range(K)]
        hat = [sum(P[i][j] * state[j, 0, t] for j in range(K)) for i in range(K)]
        for i in range(K):
            expected[i, 0, t] = hat[i] + g[i] * (y[0, t] - hat[2])
    torch.testing.assert_close(rule(state, layer, 1), expected)


@pytest.mark.parametrize("feed", ["old", "predicted"])
def test_starts_as_the_static_rule(feed):
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    dynamic, static = DynamicAltUp(2, 3, 8, feed=feed), AltUp(2, 3)
    states = [torch.randn(2, 2, 3, 8)] * 2
    for i, layer in enumerate(layers):
        states = [dynamic(states[0], layer, i), static(states[1], layer, i)]
    torch.testing.assert_close(*states)


def test_gradients_reach_every_coefficient_after_one_step():
    """A and C start at zero and hide the router, which gets its gradient once they have moved."""
    rule = DynamicAltUp(2, 2, 8)
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    optimizer = torch.optim.SGD(rule.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        state = torch.randn(2, 3, 5, 8)
        for i, layer in enumerate(layers):
            state = rule(state, layer, i)
        state.square().mean().backward()
        optimizer.step()
    for name, parameter in rule.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_twins_may_part_and_the_function_stays():
    rule = DynamicAltUp(4, 3, 8, "same", recycled=True, lowering="mean")
    assert rule.updates[0].A.abs().max() > 0
    x = torch.randn(2, 3, 8)
    state = rule.lift(x)
    for i in range(3):
        state = rule(state, lambda block: block + block.sin(), i)
    dense = x
    for _ in range(3):
        dense = dense + dense.sin()
    torch.testing.assert_close(rule.lower(state), dense, rtol=1e-4, atol=1e-5)


def test_half_precision_keeps_float32_coefficients():
    update = DynamicUpdate(2, 0, 8).bfloat16()
    assert {parameter.dtype for parameter in update.parameters()} == {torch.float32}
    state = torch.randn(2, 1, 3, 8).bfloat16()
    assert update(state, state[0]).dtype == torch.bfloat16


def test_autocast_rounds_no_coefficients():
    update = DynamicUpdate.from_gemma3n(gemma())
    state, y = torch.randn(4, 2, 3, 16), torch.randn(2, 3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        new = update(state, y)
    assert torch.equal(new, update(state, y))


@pytest.mark.parametrize("method", ["altup", "recycled"])
def test_in_our_models(method, tmp_path):
    """Built from a config, starting as the static model, counted right, trained, saved and loaded."""
    from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
    from altup.models.accounting import account

    def build(**fields):
        torch.manual_seed(0)
        return AltUpT5ForConditionalGeneration(
            AltUpT5Config.from_preset("tiny", method, vocab_size=50, num_layers=2, d_model=32, **fields)
        ).eval()

    static, model = build(), build(coefficients="dynamic")
    counted = account(model.config).parameters["coefficients"]
    assert counted == sum(p.numel() for n, p in model.named_parameters() if ".rule." in n)
    same = {n: p for n, p in static.state_dict().items() if ".rule." not in n}
    model.load_state_dict(same, strict=False)
    batch = {"input_ids": torch.randint(2, 50, (2, 7)), "labels": torch.randint(2, 50, (2, 5))}
    torch.testing.assert_close(model(**batch).logits, static(**batch).logits)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(5):
        losses.append(model(**batch).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert model.encoder.rule.updates[0].A.abs().max() > 0
    model.save_pretrained(tmp_path)
    loaded = AltUpT5ForConditionalGeneration.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


def test_dynamic_needs_blocks():
    from altup import AltUpT5Config
    from altup.core.errors import UserError

    with pytest.raises(UserError, match="coefficients='dynamic' does not fit widening='none'"):
        AltUpT5Config.from_preset("tiny", "dense", coefficients="dynamic")
