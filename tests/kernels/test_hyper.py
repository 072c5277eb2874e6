"""Hyper-connections: the definition against transformers' module, and the kernels, forward and every gradient,
against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.hyper import Maps, coefficients, read, sinkhorn_reference, write
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, runs_kernel
from tests.kernels.updates import SUM_TOLERANCE, TOLERANCE, distance

EPS, NORM_EPS = 1e-6, 1e-5


def problem(K, d, tokens=(2, 5), dtype=torch.float32, device=DEVICE):
    """State, weight, base, scale and what a layer computed; coefficients are neither flat nor saturated."""
    M = 2 * K + K * K
    weight = torch.randn(M, K * d, device=device) / (K * d) ** 0.5
    base, scale = torch.randn(M, device=device), 1 + torch.rand(3, device=device)
    state = torch.randn(*tokens, K, d, device=device).to(dtype)
    y = torch.randn(*tokens, d, device=device).to(dtype)
    return [t.requires_grad_() for t in (state, weight, base, scale, y)]


def site(x, weight, base, scale, y, implementation, dim=-2, rounds=20):
    """One site, whose layer is z + y: what it is given, and the new state [..., K, d]."""
    x = x if dim else x.movedim(-2, 0)
    a, b, A = coefficients(x, Maps(weight, base, scale, NORM_EPS, EPS, rounds), implementation, dim)
    z = read(x, a, implementation, dim)
    new = write(x, z + y, b, A, implementation, dim)
    return a, b, A, z, new if dim else new.movedim(0, -2)


def compare(inputs, **options):
    dtype = inputs[0].dtype
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = site(*wide, "plain", rounds=options.get("rounds", 20))
    made = site(*inputs, "triton", **options)
    upstream = [torch.randn(t.shape, device=DEVICE, dtype=torch.float64) for t in exact]
    want = torch.autograd.grad(exact, wide, upstream)
    got = torch.autograd.grad(made, inputs, [u.to(t.dtype) for u, t in zip(upstream, made, strict=True)])
    for one, other in zip(made, exact, strict=True):
        assert one.shape == other.shape
        assert distance(one, other) < 3 * max(TOLERANCE[dtype], SUM_TOLERANCE)
    for one, other, like in zip(got, want, inputs, strict=True):
        assert (one.dtype, one.shape) == (like.dtype, like.shape)
        assert distance(one, other) < 5 * max(TOLERANCE[dtype], SUM_TOLERANCE)


@pytest.mark.parametrize("K", [2, 4])
def test_the_definition_is_transformers(K):
    """Its module, and the update in its layer: values and all gradients in float32."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from types import SimpleNamespace

    config = SimpleNamespace(
        hc_mult=K, hc_sinkhorn_iters=20, hc_eps=EPS, rms_norm_eps=NORM_EPS, hidden_size=12, num_attention_heads=1
    )
    module = modeling.DeepseekV4HyperConnection(config)
    x, weight, base, scale, y = inputs = problem(K, 12, device="cpu")
    for parameter, value in zip((module.fn, module.base, module.scale), (weight, base, scale), strict=True):
        parameter.data.copy_(value.detach())
    post, comb, z = module(x)
    new = post.unsqueeze(-1) * (z + y).unsqueeze(-2) + comb.transpose(-1, -2) @ x
    mine = site(*inputs, "plain")
    torch.testing.assert_close(mine[3:], (z, new), rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(new)
    want = torch.autograd.grad(new, [x, module.fn, module.base, module.scale, y], upstream)
    got = torch.autograd.grad(mine[-1], inputs, upstream)
    for a, b in zip(got, want, strict=True):
        assert distance(a, b.double()) < 1e-5


def test_sinkhorn_makes_it_doubly_stochastic():
    mix = sinkhorn_reference(torch.randn(7, 4, 4, dtype=torch.float64), 0.0, 200)
    for dim in (-1, -2):
        torch.testing.assert_close(mix.sum(dim), torch.ones(7, 4, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, -2])
def test_one_layout_is_the_other(dim):
    inputs = problem(3, 8, device="cpu")
    for a, b in zip(site(*inputs, "plain", dim), site(*inputs, "plain"), strict=True):
        torch.testing.assert_close(a, b)


def test_what_does_not_fit_is_refused():
    x, weight, base, scale, _ = problem(2, 6, device="cpu")
    with pytest.raises(UserError, match="do not fit a state of 2 blocks"):
        coefficients(x, Maps(weight[:, :-1], base, scale, NORM_EPS, EPS, 20))
    with pytest.raises(UserError, match="implementation='triton' needs"):
        coefficients(x.double(), Maps(weight, base, scale, NORM_EPS, EPS, 20), "triton")


@runs_kernel
@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize(
    ("K", "d", "dtype"),
    fewer(
        [(2, 16, torch.float32), (4, 72, torch.float32), (4, 40, torch.bfloat16)],
        [(K, d, t) for K in (2, 3, 4, 8) for d in (64, 328) for t in (torch.float32, torch.bfloat16)],
    ),
)
def test_kernels(K, d, dtype, dim, poisoned):
    compare(problem(K, d, dtype=dtype), dim=dim, rounds=fewer(4, 20))


@runs_kernel
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_rounds_of_sinkhorn(rounds):
    compare(problem(2, 16, tokens=(3,)), rounds=rounds)


@runs_kernel
def test_tokens_beyond_a_program():
    compare(problem(2, 16, tokens=(70,)), rounds=3)


@runs_kernel
def test_operator_registrations():
    from altup.kernels.hyper.triton import from_logits, from_logits_backward, logits, logits_backward

    x, weight, *_ = problem(2, 16, tokens=(3,))
    check_operator(logits, x, weight, NORM_EPS, -2)
    u = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    check_operator(from_logits, u, EPS, 3, 2)
    numbers = torch.randn(3, 2, device=DEVICE)
    given = numbers, numbers, torch.randn(3, 2, 2, device=DEVICE), u.detach(), EPS, 3, 2
    check_operator(from_logits_backward, *given, checks=CHEAP_CHECKS)
    given = torch.randn(3, 8, device=DEVICE), torch.randn(3, device=DEVICE), x.detach(), weight.detach(), -2
    check_operator(logits_backward, *given, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiles_as_one_graph():
    inputs = problem(2, 16, tokens=(3,))
    compiled = torch.compile(site, backend=BACKEND, fullgraph=True)
    want, got = site(*inputs, "triton", rounds=2), compiled(*inputs, "triton", rounds=2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("K", "dtype"), [(2, "fp32"), (4, "bf16")])
def test_the_kernels_compile_for_hopper_and_stay_in_registers(K, dtype, hopper):
    from altup.kernels.hyper import triton as kernels

    M = 2 * K + K * K
    wide = dict.fromkeys(
        ("w", "r", "weight", "d_raw", "along", "a", "b", "mix", "u", "du", "da", "db", "d_mix"), "*fp32"
    )
    numbers = dict.fromkeys(("tokens", "row", "block", "d", "rounds"), "i32") | {"eps": "fp32"}
    given = dict.fromkeys(("x", "dx"), f"*{dtype}") | wide | numbers
    tile = {"M": M, "ROWS": kernels.TOKENS, "COLUMNS": kernels.COLUMNS, "WIDE": kernels._wide(M)}
    tile |= {"K": K, "LANES": kernels.LANES, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    for kernel, warps in (
        (kernels._logits_kernel, kernels.WARPS),
        (kernels._logits_backward_kernel, kernels.WARPS),
        (kernels._from_logits_kernel, 1),
        (kernels._from_logits_backward_kernel, 1),
    ):
        sizes = ("row", "block", "d")
        compiled = hopper.build(kernel, given | tile, divisible=sizes, num_warps=warps)
        assert not hopper.spills(compiled)
