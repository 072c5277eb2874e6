"""Algorithm 2's update: the definition against the paper's lines, the public function, and the kernels, forward
and every gradient, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels import sequence_update, sequence_update_reference
from tests.kernels.interpreter import (
    BACKEND,
    CHEAP_CHECKS,
    DEVICE,
    INTERPRETED,
    check_operator,
    fewer,
    needs_gpu,
    runs_kernel,
)
from tests.kernels.updates import SUM_TOLERANCE, TOLERANCE, distance


def algorithm_2(x, layer, a1, a2, b, k):
    """The paper's Algorithm 2 on a list of vectors; `layer` maps the list of kept vectors to as many."""
    T = len(x)
    y_hat = [a1 * x[i] + a2 * x[(i // k) * k] for i in range(T)]
    kept = list(range(0, T, k))
    y_tilde = dict(zip(kept, layer([x[i] for i in kept]), strict=True))
    return [y_hat[i] + b * (y_tilde[(i // k) * k] - y_hat[(i // k) * k]) for i in range(T)]


@pytest.mark.parametrize(("T", "stride"), [(1, 4), (8, 4), (9, 4), (11, 4), (7, 3), (5, 1), (3, 8)])
@pytest.mark.parametrize("update", [sequence_update, sequence_update_reference])
def test_sequence_update_is_algorithm_2(T, stride, update):
    x = torch.randn(2, T, 3, dtype=torch.float64)
    a, b = torch.randn(2, dtype=torch.float64), torch.randn(1, dtype=torch.float64)
    computed = torch.tanh(x[:, ::stride] * 1.5)
    got = update(x, computed, a, b, stride)
    for row in range(2):
        want = algorithm_2(
            list(x[row]), lambda kept: [torch.tanh(v * 1.5) for v in kept], a[0], a[1], b[0], stride
        )
        torch.testing.assert_close(got[row], torch.stack(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("T", "stride"), [(5, 2), (4, 4), (6, 4)])
def test_sequence_update_gradients(T, stride):
    inputs = [
        torch.randn(1, T, 2, dtype=torch.float64),
        torch.randn(1, -(-T // stride), 2, dtype=torch.float64),
        torch.randn(2, dtype=torch.float64),
        torch.randn(1, dtype=torch.float64),
    ]
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *args: sequence_update(*args, stride=stride), inputs)


@pytest.mark.parametrize("stride", [3, 4])
def test_lengths_that_do_not_fit_are_refused(stride):
    a, b = torch.ones(2), torch.ones(1)
    with pytest.raises(UserError, match=f"stride={stride}"):
        sequence_update(torch.zeros(1, 9, 4), torch.zeros(1, 4, 4), a, b, stride)


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


def fused(x, computed, a, b, stride):
    return sequence_update(x, computed, a, b, stride, "triton")


def compare(x, computed, a, b, stride, run=fused):
    inputs = [x, computed, a, b]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = sequence_update_reference(*wide, stride)
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
    ("tokens", "stride"),
    fewer(
        [(1, 4), (11, 4), (7, 3), (5, 1), (3, 8), (37, 16)],
        [(1, 4), (8, 4), (9, 4), (11, 4), (7, 3), (5, 1), (3, 8), (37, 16), (17, 2)],
    ),
)
def test_lengths_and_strides(tokens, stride, poisoned):
    compare(*problem(tokens, stride), stride)


@runs_kernel
@pytest.mark.parametrize(
    ("tokens", "d"),
    fewer(
        [(17, 1), (17, 3), (513, 8), (17, 769)],
        [(tokens, d) for tokens in (17, 511, 513) for d in (1, 3, 8, 48, 769)],
    ),
)
def test_odd_widths(tokens, d, poisoned, cut):
    if INTERPRETED:
        cut(vectors=64, programs_per_sm=2)
    compare(*problem(tokens, 4, d, batch=1), 4)


@runs_kernel
@pytest.mark.parametrize("programs", [1, 3])
def test_few_programs_walk_through_many_chunks(programs, poisoned, cut):
    cut(warps=1, programs_per_sm=programs)
    compare(*problem(fewer(67, 131), 4, 40), 4)


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
    from altup.kernels.sequence_update.triton import sequence_update_backward, sequence_update_op

    inputs = problem(6, 4, 8)
    check_operator(sequence_update_op, *inputs, 4)
    plain = [t.detach() for t in inputs]
    check_operator(sequence_update_backward, torch.randn_like(plain[0]), *plain, 4, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiles_as_one_graph():
    compare(*problem(9, 4), 4, run=torch.compile(fused, backend=BACKEND, fullgraph=True))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_training_size(dtype, poisoned):
    inputs = problem(512, 4, 768, dtype, batch=64)
    compare(*inputs, 4)
    upstream = torch.randn_like(inputs[0])
    first, again = (torch.autograd.grad(sequence_update(*inputs, 4), inputs, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_passes_move_16_bytes_at_a_time(stride, hopper):
    from altup.kernels.sequence_update import triton as kernels

    sizes = dict.fromkeys(("count", "tokens", "windows", "per_row"), "i32")
    given = {"x": "*bf16", "computed": "*bf16", "a": "*fp32", "b": "*fp32", **sizes}
    config = kernels.FORWARD
    constants = {"STRIDE": stride, "VECTORS": 32 * config.warps * config.vectors, "WIDTH": 8}
    forward = hopper.build(kernels._forward_kernel, {"out": "*bf16", **given, **constants}, num_warps=config.warps)
    assert not hopper.spills(forward)
    assert forward.asm["ptx"].count("ld.global.v4") == (stride + 1) * config.vectors

    config = kernels.BACKWARD[stride]
    constants |= {"VECTORS": 32 * config.warps * config.vectors, "STAGES": config.stages}
    results = {"dx": "*bf16", "d_computed": "*bf16", "partials": "*fp32", "grad": "*bf16"}
    backward = hopper.build(kernels._backward_kernel, {**results, **given, **constants}, num_warps=config.warps)
    assert not hopper.spills(backward)
    assert backward.asm["ptx"].count("st.global.v4") == (stride + 1) * config.vectors


def test_sums_of_coefficients_stay_in_registers(hopper):
    from altup.kernels.sequence_update import triton as kernels

    arguments = dict.fromkeys(("da", "db", "partials", "a", "b"), "*fp32") | {"programs": "i32"}
    config = kernels.COEFFICIENTS
    arguments["CHUNK"] = config.vectors * 32 * config.warps
    compiled = hopper.build(kernels._coefficients_kernel, arguments, num_warps=config.warps)
    assert not hopper.spills(compiled)
