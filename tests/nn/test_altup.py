from __future__ import annotations

import pytest
import torch
from torch import nn

from altup import AltUp
from altup.nn import Sum


def affine(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh()).double()


@pytest.mark.parametrize("selection", ["alternating", "same"])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_stack_is_algorithm_1_layer_by_layer(K, selection):
    """Five layers against the paper's three lines, and against predict and correct called one by one."""
    layers = [affine(4) for _ in range(5)]
    rule = AltUp(K, len(layers), selection).double()
    for parameter in rule.parameters():
        nn.init.normal_(parameter)
    state = rule.lift(torch.randn(2, 3, 4 * K, dtype=torch.float64))
    x_old = [state[i] for i in range(K)]
    by_parts = state
    for index, layer in enumerate(layers):
        state = rule(state, layer, index)
        j = index % K if selection == "alternating" else 0
        by_parts = rule.correct(rule.predict(by_parts, index), layer(by_parts[j]), index)
        if K == 1:
            x_old = [layer(x_old[0])]
        else:
            p, g = rule.updates[index].P, rule.updates[index].g
            x_hat = [sum(p[i, m] * x_old[m] for m in range(K)) for i in range(K)]
            x_tilde = layer(x_old[j])
            x_old = [x_hat[i] + g[i] * (x_tilde - x_hat[j]) for i in range(K)]
        torch.testing.assert_close(state, torch.stack(x_old))
        torch.testing.assert_close(by_parts, torch.stack(x_old))
    torch.testing.assert_close(rule.lower(state), torch.cat(x_old, dim=-1))


def test_gradients_of_a_stack():
    layers = [affine(2), affine(2), affine(2)]
    rule = AltUp(3, 3).double()

    def stack(x, *coefficients):
        state = rule.lift(x)
        for index, layer in enumerate(layers):
            state = torch.func.functional_call(
                rule, dict(zip(names, coefficients, strict=True)), (state, layer, index)
            )
        return rule.lower(state)

    names = [name for name, _ in rule.named_parameters()]
    inputs = [torch.randn(1, 2, 6, dtype=torch.float64), *(torch.randn_like(p) for p in rule.parameters())]
    assert torch.autograd.gradcheck(stack, [t.detach().requires_grad_() for t in inputs])


def test_one_block_has_no_coefficients_and_is_dense():
    layers = [affine(4) for _ in range(3)]
    rule = AltUp(1, 3)
    assert list(rule.parameters()) == []
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    state, want = rule.lift(x), x
    for index, layer in enumerate(layers):
        state, want = rule(state, layer, index), layer(want)
    assert torch.equal(rule.lower(state), want)


def test_one_block_is_passed_on_without_a_copy():
    """Forward and backward: torch.unbind's gradient, a stack of one, would be a copy a layer."""
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4, requires_grad=True)
    rule = AltUp(num_blocks=1, num_layers=1)
    (new,) = rule((x,), lambda _: y, 0)
    assert new is y
    assert rule.lower((new,)) is y
    assert rule.correct((x,), y, 0)[0] is y


@pytest.mark.parametrize("lowering", ["sum", "mean"])
@pytest.mark.parametrize("K", [2, 3, 4])
def test_recycled_starts_as_the_dense_stack(K, lowering):
    layers = [affine(4) for _ in range(6)]
    rule = AltUp(K, 6, recycled=True, lowering=lowering).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    state, want = rule.lift(x), x
    for index, layer in enumerate(layers):
        state, want = rule(state, layer, index), layer(want)
    torch.testing.assert_close(rule.lower(state), want * (K if lowering == "sum" else 1))


def test_alternation_and_lists():
    assert AltUp(3, 7).active == (0, 1, 2, 0, 1, 2, 0)
    assert AltUp(3, 4, "same").active == (0, 0, 0, 0)
    assert AltUp(3, 4, [2, 1, 1, 0]).active == (2, 1, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_blocks": 0, "num_layers": 2}, "num_blocks=0"),
        ({"num_blocks": 2, "num_layers": 0}, "num_layers=0"),
        ({"num_blocks": 2, "num_layers": 2, "selection": "random"}, "selection='random'"),
        ({"num_blocks": 2, "num_layers": 2, "selection": [0, 2]}, "from 0 to 1"),
        ({"num_blocks": 2, "num_layers": 3, "selection": [0, 1]}, "each of the 3 layers"),
        ({"num_blocks": 2, "num_layers": 3, "lowering": "max"}, "lowering='max'"),
        ({"num_blocks": 2, "num_layers": 2, "selection": [0.0, 1]}, "selection="),
        ({"num_blocks": 2, "num_layers": 2, "selection": [True, 0]}, "selection="),
        ({"num_blocks": 2, "num_layers": 2, "selection": None}, "selection=None"),
    ],
)
def test_nonsense_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        AltUp(**arguments)


@pytest.mark.parametrize("rule", [AltUp(2, 1), Sum(2)])
def test_lift_refuses_a_width_that_does_not_split(rule):
    with pytest.raises(ValueError, match="7 wide"):
        rule.lift(torch.randn(1, 1, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predict_and_correct_are_exact_under_autocast(dtype):
    update = AltUp(3, 1).updates[0]
    nn.init.normal_(update.P)
    state, computed = torch.randn(3, 2, 5, 4, dtype=dtype), torch.randn(2, 5, 4, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_parts = update.correct(update.predict(state), computed)
        fused = update(state, computed)
    torch.testing.assert_close(by_parts, fused, rtol=1e-6, atol=1e-6)


def test_twins_are_found_and_parted_without_changing_the_function():
    assert not AltUp(2, 4, "same").has_twins
    assert AltUp(4, 4, "same").has_twins
    assert not AltUp(4, 4).has_twins
    assert AltUp(4, 2).has_twins
    rule = AltUp(4, 3, "same", recycled=True).double()
    for P in (update.P for update in rule.updates):
        torch.testing.assert_close(P.sum(dim=1), torch.ones(4, dtype=P.dtype), atol=1e-6, rtol=0)
        assert not torch.equal(P, torch.eye(4, dtype=P.dtype))


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_coefficients_stay_float32_to_the_bit(convert):
    model = nn.ModuleDict({"rule": AltUp(2, 3), "layer": nn.Linear(4, 4)})
    for parameter in model["rule"].parameters():
        nn.init.normal_(parameter)
    before = [p.clone() for p in model["rule"].parameters()]
    convert(model)
    assert model["layer"].weight.dtype in (torch.bfloat16, torch.float16)
    for old, new in zip(before, model["rule"].parameters(), strict=True):
        assert new.dtype == torch.float32
        assert torch.equal(old, new)
    assert model.double()["rule"].updates[0].P.dtype == torch.float64


def test_coefficients_are_float32_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(p.dtype == torch.float32 for p in AltUp(2, 2).parameters())
    finally:
        torch.set_default_dtype(torch.float32)


def test_sum_adds_the_tables_and_is_dense():
    layer = affine(3)
    tables = torch.randn(2, 5, 6, dtype=torch.float64)
    rule = Sum(2)
    state = rule(rule.lift(tables), layer, 0)
    torch.testing.assert_close(rule.lower(state), layer(tables[..., :3] + tables[..., 3:]))


@pytest.mark.parametrize("rule", [AltUp(1, 3), AltUp(3, 3), AltUp(3, 3, recycled=True), Sum(3)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_tuple_of_blocks_and_layers_in_two_terms_change_nothing(rule, apart):
    """Outputs and gradients are those of the stacked state and of layers that return x + update."""
    rule = rule.double()
    for parameter in rule.parameters():
        nn.init.normal_(parameter)
    layers = [affine(4) for _ in range(3)]
    x = torch.randn(2, 5, 4 if getattr(rule, "recycled", False) else 4 * rule.num_blocks, dtype=torch.float64)
    x.requires_grad_()

    def run(state, apart):
        for index, layer in enumerate(layers):

            def residual_layer(x, layer=layer):
                return (x, layer(x)) if apart else x + layer(x)

            state = rule(state, residual_layer, index)
        return state

    want = run(rule.lift(x), apart=False)
    got = run(rule.lift(x).unbind(0), apart)
    assert isinstance(got, tuple)
    torch.testing.assert_close(torch.stack(got), want)
    torch.testing.assert_close(run(rule.lift(x), apart), want)
    torch.testing.assert_close(rule.lower(got), rule.lower(want))
    inputs = [x, *rule.parameters()]
    for a, b in zip(
        torch.autograd.grad(rule.lower(got).sin().sum(), inputs),
        torch.autograd.grad(rule.lower(want).sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("K", [1, 3])
def test_predict_and_correct_take_tuples(K):
    rule = AltUp(K, 1).double()
    for parameter in rule.parameters():
        nn.init.normal_(parameter)
    state, computed = torch.randn(K, 2, 5, 4, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    new = rule.correct(rule.predict(state.unbind(0), 0), computed, 0)
    assert isinstance(new, tuple)
    torch.testing.assert_close(torch.stack(new), rule.correct(rule.predict(state, 0), computed, 0))


@pytest.mark.parametrize("lowering", ["concat", "sum", "mean"])
def test_lowering_a_tuple_rounds_no_more_than_lowering_a_tensor(lowering):
    state = torch.randn(5, 2, 7, 4).bfloat16()
    rule = AltUp(5, 1, lowering=lowering)
    assert torch.equal(rule.lower(state.unbind(0)), rule.lower(state))


def test_blocks_put_side_by_side_by_compiled_code_get_gradients_that_need_no_copy():
    blocks = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(2, 3, 12)
    want = torch.autograd.grad(AltUp(3, 1).lower(blocks), blocks, upstream)
    lower = torch.compile(AltUp(3, 1).lower, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(lower(blocks), blocks, upstream)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rule", [AltUp(2, 1), AltUp(1, 1), Sum(1)])
@pytest.mark.parametrize("output", [lambda x: (x,), lambda x: (x, x, x), lambda x: (x, x[..., :1])])
def test_a_layer_that_returns_something_else_is_refused(rule, output):
    with pytest.raises(ValueError, match="residual, update"):
        rule(torch.randn(rule.num_blocks, 1, 3, 4), output, 0)


@pytest.mark.parametrize("trains", [True, False])
def test_compiled_blocks_lie_side_by_side(trains):
    torch._dynamo.reset()
    rule, state = AltUp(num_blocks=2, num_layers=1), torch.randn(2, 3, 4, 5)
    blocks = [block.clone().requires_grad_(trains) for block in state]
    got = torch.compile(lambda *given: rule.lower(given), backend="aot_eager", fullgraph=True)(*blocks)
    assert torch.equal(got, torch.cat(list(state), dim=-1))
    if trains:
        upstream = torch.randn_like(got)
        gradients = torch.autograd.grad(got, blocks, upstream)
        assert all(map(torch.equal, gradients, upstream.chunk(2, dim=-1)))
