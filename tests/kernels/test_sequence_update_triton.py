"""The fused Sequence-AltUp update, forward and every gradient, against Algorithm 2 in float64.

Where there is no GPU the kernels run in Triton's interpreter, as in test_altup_update_triton.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import library

from altup.core.errors import UserError
from altup.kernels import sequence_update
from altup.kernels.sequence_update.op import sequence_update_backward, sequence_update_op
from tests.kernels.interpreter import (
    DEVICE,
    INTERPRETED,
    needs_gpu,
    outside_the_interpreter,
    pass_in_the_interpreter,
    runs_kernel,
)
from tests.kernels.updates import SUM_TOLERANCE, TOLERANCE


@pytest.fixture
def cut(monkeypatch):
    """Set how the kernels are cut."""
    kernels = pytest.importorskip("altup.kernels.sequence_update.triton")

    def cut(**fields):
        monkeypatch.setattr(kernels, "FORWARD", kernels.FORWARD._replace(**fields))
        for stride, config in kernels.BACKWARD.items():
            monkeypatch.setitem(kernels.BACKWARD, stride, config._replace(**fields))

    return cut


def problem(tokens, stride, d=24, dtype=torch.float32, computed_dtype=None, batch=2):
    """x, the layer's output, a, b. Numbers lie around 1, so that their long sums do not cancel."""
    windows = -(-tokens // stride)
    sizes = [(batch, tokens, d), (batch, windows, d), (2,), (1,)]
    dtypes = [dtype, computed_dtype or dtype, torch.float32, torch.float32]
    return [
        (1 + torch.randn(*s, device=DEVICE)).to(t).requires_grad_() for s, t in zip(sizes, dtypes, strict=True)
    ]


def algorithm_2(x, computed, a, b, stride):
    """Predict every token from its anchor, then correct it with what was computed there."""
    anchor = torch.arange(x.shape[1], device=x.device) // stride
    predicted = a[0] * x + a[1] * x[:, anchor * stride]
    return predicted + b * (computed[:, anchor] - predicted[:, anchor * stride])


def distance(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def fused(x, computed, a, b, stride):
    return sequence_update(x, computed, a, b, stride, "triton")


def compare(x, computed, a, b, stride, run=fused):
    inputs = [x, computed, a, b]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = algorithm_2(*wide, stride)
    upstream = (1 + torch.randn(x.shape, device=DEVICE)).to(x.dtype)
    wanted = [exact, *torch.autograd.grad(exact, wide, upstream.double())]
    new = run(*inputs, stride)
    for got, want, like in zip(
        [new, *torch.autograd.grad(new, inputs, upstream)], wanted, [x, *inputs], strict=True
    ):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
        is_sum = any(like is coefficient for coefficient in (a, b))
        assert distance(got, want) < (SUM_TOLERANCE if is_sum else TOLERANCE[like.dtype])


@runs_kernel
@pytest.mark.parametrize(
    ("tokens", "stride"), [(1, 4), (8, 4), (9, 4), (11, 4), (7, 3), (5, 1), (3, 8), (37, 16), (17, 2)]
)
def test_lengths_and_strides(tokens, stride, poisoned):
    compare(*problem(tokens, stride), stride)


@runs_kernel
@pytest.mark.parametrize("d", [1, 3, 8, 48, 769])
@pytest.mark.parametrize("tokens", [17, 511, 513])
def test_odd_widths(tokens, d, poisoned, cut):
    if INTERPRETED:
        cut(vectors=64, programs_per_sm=2)
    compare(*problem(tokens, 4, d, batch=1), 4)


@runs_kernel
@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_walk_through_many_chunks(programs, poisoned, cut):
    cut(warps=1, programs_per_sm=programs)
    compare(*problem(131, 4, 40), 4)


@runs_kernel
@pytest.mark.parametrize(
    ("dtype", "computed_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_dtypes(dtype, computed_dtype, poisoned):
    compare(*problem(33, 4, 48, dtype, computed_dtype), 4)


@runs_kernel
def test_non_contiguous_inputs(poisoned):
    x, computed, _, _ = problem(9, 4, 16)
    coefficients = torch.randn(3, 2, device=DEVICE, requires_grad=True)
    b = torch.randn(1, device=DEVICE, requires_grad=True)
    compare(x[..., ::2], computed[..., 8:], coefficients[1:, 0], b, 4)
    wide = torch.randn(9, 2, 24, device=DEVICE, requires_grad=True).transpose(0, 1)
    compare(wide, problem(9, 4)[1], coefficients[0], b, 4)


@runs_kernel
def test_nothing_in_nothing_out():
    x, computed, a, b = problem(8, 4, batch=0)
    new = fused(x, computed, a, b, 4)
    assert new.shape == x.shape
    assert not any(gradient.any() for gradient in torch.autograd.grad(new.sum(), (a, b)))


@runs_kernel
def test_operator_registrations():
    inputs = problem(6, 4, 8)
    library.opcheck(sequence_update_op, (*inputs, 4))
    plain = [t.detach() for t in inputs]
    library.opcheck(sequence_update_backward, (torch.randn_like(plain[0]), *plain, 4))


@runs_kernel
def test_compiles_as_one_graph():
    backend = "aot_eager" if INTERPRETED else "inductor"
    compare(*problem(9, 4), 4, run=torch.compile(fused, backend=backend, fullgraph=True))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_training_size(dtype, poisoned):
    inputs = problem(512, 4, 768, dtype, batch=64)
    compare(*inputs, 4)
    upstream = torch.randn_like(inputs[0])
    first, again = (torch.autograd.grad(sequence_update(*inputs, 4), inputs, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("stride", [3, 4])
def test_lengths_that_do_not_fit_are_refused(stride):
    a, b = torch.ones(2), torch.ones(1)
    with pytest.raises(UserError, match=f"stride={stride}"):
        sequence_update(torch.zeros(1, 9, 4), torch.zeros(1, 4, 4), a, b, stride)


@outside_the_interpreter
def test_kernels_in_the_interpreter():
    pass_in_the_interpreter(__file__)
