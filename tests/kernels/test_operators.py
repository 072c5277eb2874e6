"""An operator through PyTorch's dispatcher and directly: the same results, gradients and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, library
from torch._subclasses.fake_tensor import FakeTensorMode

from altup.kernels import operators as module
from altup.kernels.operators import Gradients, operator

ABSENT: list[tuple[bool, bool]] = []  # which gradients did not come
RUNS: list[type] = []  # the class of tensors of each run of the function


@operator("altup_tests::scale")
def scale(
    xs: Sequence[Tensor], weight: Tensor | None, factor: float
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """factor·weight·x of each x, a number for each that has no gradient, and factor·x of the first."""
    outs, sums, first = results = (
        [torch.empty_like(x) for x in xs],
        xs[0].new_empty(len(xs)),
        torch.empty_like(xs[0]),
    )
    yield results
    RUNS.append(type(xs[0]))
    for i, x in enumerate(xs):
        torch.mul(x, factor if weight is None else factor * weight, out=outs[i])
        sums[i] = x.sum()
    torch.mul(xs[0], factor, out=first)


@operator("altup_tests::scale_backward")
def scale_backward(grads: Sequence[Tensor], weight: Tensor | None, factor: float) -> Iterator[list[Tensor]]:
    outs = [torch.empty_like(g) for g in grads]
    yield outs
    for out, grad in zip(outs, grads, strict=True):
        torch.mul(grad, factor if weight is None else factor * weight, out=out)


@scale.gradient
def _(
    d_outs: list[Tensor], _sums: None, d_first: Tensor, *, xs: list[Tensor], outs: list[Tensor],
    weight: Tensor | None, factor: float, needs: set[str],
) -> Gradients:  # fmt: skip
    assert [x.shape for x in xs] == [out.shape for out in outs]
    d_xs = scale_backward(d_outs, weight, factor)
    d_xs[0] = d_xs[0] + factor * d_first
    if "weight" not in needs:
        return {"xs": d_xs}
    return {"xs": d_xs, "weight": sum(factor * x * g for x, g in zip(xs, d_outs, strict=True))}


@operator("altup_tests::square")
def square(x: Tensor) -> Iterator[Tensor]:
    out = torch.empty_like(x)
    yield out
    torch.mul(x, x, out=out)


@square.gradient
def _(d_out: Tensor, *, x: Tensor) -> Gradients:
    return {"x": 2 * x * d_out}


@operator("altup_tests::halves")
def halves(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    half = len(x) // 2
    results = x.new_empty(half), x.new_empty(half)
    yield results
    for out, part in zip(results, x.split(half), strict=True):
        out.copy_(part)


@halves.gradient
def _(d_first: Tensor | None, d_second: Tensor | None) -> Gradients:
    """Without zeros for a half that nobody reads."""
    ABSENT.append((d_first is None, d_second is None))
    zeros = torch.zeros_like(d_first if d_second is None else d_second)
    return {"x": torch.cat([zeros if d is None else d for d in (d_first, d_second)])}


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
    (a, b), sums, _ = scale([first, second], weight.detach() if frozen else weight, 2.0)
    assert not sums.requires_grad
    assert torch.equal(sums, torch.stack([first.sum(), second.sum()]))
    given = [first, second] if frozen else [first, second, weight]
    slopes = torch.autograd.grad((a * b).sum(), given)
    assert torch.equal(a, first * (2.0 * weight))
    torch.testing.assert_close(slopes[0], b * 2 * weight)
    if not frozen:
        torch.testing.assert_close(slopes[2], 2 * (first * b + second * a))
    (only,), _, _ = scale([first], None, 3.0)
    assert torch.equal(torch.autograd.grad(only.sum(), first)[0], torch.full((3,), 3.0))
    (only,), _, plain = scale([first], None, 3.0)
    assert torch.equal(torch.autograd.grad((only + 2 * plain).sum(), first)[0], torch.full((3,), 9.0))


def test_a_gradient_that_is_absent_stays_so(direct):
    x = torch.randn(4, requires_grad=True)
    ABSENT.clear()
    (slope,) = torch.autograd.grad(halves(x)[1].sum(), x)
    assert slope.tolist() == [0, 0, 1, 1]
    assert ABSENT == [(True, False)]


def test_what_pytorch_checks():
    library.opcheck(scale.registered, (inputs()[:2], inputs()[2], 2.0))
    library.opcheck(square.registered, (inputs()[0],))


def test_names_that_do_not_fit_are_refused():
    def of(x: Tensor) -> Iterator[Tensor]:
        yield torch.empty_like(x)

    for wrong in (lambda grad: {}, lambda d_out, d_more: {}, lambda d_out, *, y: {}):
        with pytest.raises(TypeError, match="a gradient"):
            operator("altup_tests::refused")(of).gradient(wrong)


def test_one_tensor(direct):
    x = inputs()[0]
    assert torch.equal(torch.autograd.grad(square(x).sum(), x)[0], 2 * x)


def test_without_gradients(direct):
    first, second, weight = inputs()
    with torch.no_grad():
        made, _, _ = scale([first, second], weight, 1.0)
    assert isinstance(made, list)
    assert not made[0].requires_grad


def test_a_second_derivative_is_refused(direct):
    first, second, weight = inputs()
    (a, _), _, _ = scale([first, second], weight, 1.0)
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
        made, _, _ = scale(fake[:2], fake[2], 1.0)
    assert made[0].shape == (3,)
    assert not RUNS
