"""An operator through PyTorch's dispatcher and directly: the same results, gradients and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from altup.kernels import operators as module
from altup.kernels.operators import operator

RUNS: list[type] = []  # the class of tensors of each run of the function


@operator("altup_tests::scale", "(Tensor[] xs, Tensor? weight, float factor) -> (Tensor[], Tensor)")
def scale(xs: list[Tensor], weight: Tensor | None, factor: float) -> tuple[list[Tensor], Tensor]:
    """factor·weight·x of each x, and a number for each that has no gradient."""
    RUNS.append(type(xs[0]))
    by = factor if weight is None else factor * weight
    return [x * by for x in xs], torch.stack([x.sum() for x in xs])


@scale.register_fake
def _(xs, weight, factor):
    return [torch.empty_like(x) for x in xs], xs[0].new_empty(len(xs))


@operator("altup_tests::scale_backward", "(Tensor[] grads, Tensor? weight, float factor) -> Tensor[]")
def scale_backward(grads: list[Tensor], weight: Tensor | None, factor: float) -> list[Tensor]:
    return [g * (factor if weight is None else factor * weight) for g in grads]


@scale_backward.register_fake
def _(grads, weight, factor):
    return [torch.empty_like(g) for g in grads]


def save(ctx, inputs, output):
    xs, weight, ctx.factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.wanted = weight is not None and weight.requires_grad
    ctx.save_for_backward(*xs, weight)


def differentiate(ctx, grads, *_):
    *xs, weight = ctx.saved_tensors
    total = sum(ctx.factor * x * g for x, g in zip(xs, grads, strict=True)) if ctx.wanted else None
    return scale_backward(grads, weight, ctx.factor), total, None


scale.register_autograd(differentiate, setup_context=save)


@operator("altup_tests::square", "(Tensor x) -> Tensor")
def square(x: Tensor) -> Tensor:
    return x * x


square.register_autograd(
    lambda ctx, grad: (2 * ctx.saved_tensors[0] * grad,),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.fixture(params=[False, True], ids=["dispatched", "direct"])
def direct(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(module, "is_unwatched", lambda first: False)
    return request.param


def inputs():
    torch.manual_seed(0)
    return [torch.randn(3, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("frozen", [False, True])
def test_lists_and_what_is_left_out(direct, frozen):
    first, second, weight = inputs()
    (a, b), sums = scale([first, second], weight.detach() if frozen else weight, 2.0)
    assert not sums.requires_grad
    given = [first, second] if frozen else [first, second, weight]
    slopes = torch.autograd.grad((a * b).sum(), given)
    assert torch.equal(a, first * (2.0 * weight))
    torch.testing.assert_close(slopes[0], b * 2 * weight)
    if not frozen:
        torch.testing.assert_close(slopes[2], 2 * (first * b + second * a))
    (only,), _ = scale([first], None, 3.0)
    assert torch.equal(torch.autograd.grad(only.sum(), first)[0], torch.full((3,), 3.0))


def test_one_tensor(direct):
    x = inputs()[0]
    assert torch.equal(torch.autograd.grad(square(x).sum(), x)[0], 2 * x)


def test_without_gradients(direct):
    first, second, weight = inputs()
    with torch.no_grad():
        made, _ = scale([first, second], weight, 1.0)
    assert isinstance(made, list)
    assert not made[0].requires_grad


def test_a_second_derivative_is_refused(direct):
    first, second, weight = inputs()
    (a, _), _ = scale([first, second], weight, 1.0)
    (slope,) = torch.autograd.grad(a.square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(slope.sum(), first)


def test_what_has_no_gradient_refuses_one(direct):
    made = scale_backward(inputs()[:2], None, 1.0)
    with pytest.raises(RuntimeError):
        made[0].sum().backward()


def test_compiled_it_stays_an_operator(direct):
    first, second, weight = inputs()
    seen = []

    def backend(graph, example):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(lambda *given: scale(list(given[:2]), given[2], 1.0)[0], backend=backend, fullgraph=True)(
        first, second, weight
    )
    assert any("altup_tests.scale" in target for target in seen)
    compiled = torch.compile(lambda x, y, w: scale([x, y], w, 1.0)[0][0], backend="aot_eager", fullgraph=True)
    slopes = torch.autograd.grad(compiled(first, second, weight).sum(), [first, weight])
    assert torch.equal(slopes[0], weight)
    assert torch.equal(slopes[1], first)


def test_fake_tensors_run_nothing(direct):
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs()]
        RUNS.clear()
        made, _ = scale(fake[:2], fake[2], 1.0)
    assert made[0].shape == (3,)
    assert not RUNS
