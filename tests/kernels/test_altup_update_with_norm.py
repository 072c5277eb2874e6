"""The update and the next layer's norm in one pass: forward and every gradient against float64."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.altup_update import altup_update_reference
from altup.kernels.altup_update.with_norm import altup_update_norm
from altup.kernels.fp8.reference import VALUE, power_of_two, quantize_reference
from altup.nn import RMSNorm
from tests.kernels.interpreter import DEVICE, fewer, needs_gpu, runs_kernel
from tests.kernels.updates import SUM_TOLERANCE, TOLERANCE, distance

EPS = 1e-6


def random(K, rows, d, dtype=torch.float32, coefficients=torch.float32, device=DEVICE):
    """K blocks, y, residual, P, g and the norm's weight."""
    blocks = [torch.randn(rows, d, device=device).to(dtype) for _ in range(K + 2)]
    P, g, weight = (torch.randn(*s, device=device).to(coefficients) for s in [(K, K), (K,), (d,)])
    return [x.requires_grad_() for x in (*blocks, P, g, weight)]


def definition(given, active, following):
    """In float64; but the norm's input is rounded as the kernel's is."""
    *state, y, residual, P, g, weight = given
    new = altup_update_reference(torch.stack(state), y + residual, P, g, active).unbind(0)
    block = new[following]
    return *new, block, block * torch.rsqrt(block.square().mean(-1, keepdim=True) + EPS) * weight


def run(given, active, following, implementation):
    *state, y, residual, P, g, weight = given
    got = altup_update_norm(state, y, residual, P, g, active, weight, EPS, following, implementation)
    return *got.state, got.residual, got.normed


def compare(given, active, following, implementation="triton"):
    wide = [x.detach().double().requires_grad_() for x in given]
    got, want = run(given, active, following, implementation), definition(wide, active, following)
    upstream = [torch.randn_like(x) for x in got]
    gradients = torch.autograd.grad(got, given, upstream)
    exact = torch.autograd.grad(want, wide, [x.double() for x in upstream])
    tolerance = TOLERANCE[given[0].dtype]
    for one, other in zip(got, want, strict=True):
        assert one.dtype == given[0].dtype
        assert distance(one, other) < 1.5 * tolerance
    for name, one, other, of in zip(names(given), gradients, exact, given, strict=True):
        assert one.dtype == of.dtype, name
        rounding = TOLERANCE[of.dtype] if of.dim() > 1 or of.dtype != torch.float32 else SUM_TOLERANCE
        assert distance(one, other) < 2 * max(rounding, tolerance), name


def names(given):
    K = len(given) - 5
    return [*(f"block {i}" for i in range(K)), "y", "residual", "P", "g", "weight"]


def test_plain_is_the_update_and_the_norm_of_the_models():
    given = random(3, 4, 6, torch.float64, torch.float64, "cpu")
    got, want = run(given, 1, 2, "auto"), definition(given, 1, 2)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))
    norm = RMSNorm(6, EPS).double()
    norm.weight.data.copy_(given[-1])
    assert torch.equal(got[-1], norm(got[2]))


def test_refuses_what_no_kernel_takes():
    given = [torch.randn(2, 4, dtype=torch.float64)] * 4
    with pytest.raises(UserError, match="float64"):
        altup_update_norm(given[:2], *given[2:], torch.eye(2), torch.ones(2), 0, torch.ones(4), EPS, 1, "triton")


@runs_kernel
@pytest.mark.parametrize(("K", "rows", "d"), [(2, 1, 4), (2, 7, 48), (2, 5, 768), (3, 6, 40), (4, 3, 130)])
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.bfloat16], list(TOLERANCE)))
def test_kernels(K, rows, d, dtype, poisoned):
    torch.manual_seed(0)
    for active in range(K):
        compare(random(K, rows, d, dtype), active, (active + 1) % K)
    compare(random(K, rows, d, dtype), 0, 0)


@runs_kernel
def test_coefficients_and_weight_in_bfloat16(poisoned):
    compare(random(2, 9, 64, torch.bfloat16, torch.bfloat16), 0, 1)


@runs_kernel
def test_programs_walk_through_many_rows(poisoned, monkeypatch):
    from altup.kernels.altup_update import norm_triton as kernels

    monkeypatch.setattr(kernels, "BACKWARD_TILE", 128)
    monkeypatch.setattr(kernels, "PROGRAMS_PER_SM", 3)
    compare(random(2, fewer(29, 20_029), 60), 1, 0)


@needs_gpu
@pytest.mark.parametrize("d", [768, 1024, 2048])
@pytest.mark.parametrize("K", [2, 4])
def test_training_sizes(K, d, poisoned):
    compare(random(K, 8192, d, torch.bfloat16, torch.bfloat16), 0, 1)


@needs_gpu
def test_two_runs_give_the_same_bits():
    given = random(2, 32_768, 768, torch.bfloat16)
    upstream = [torch.randn(32_768, 768, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    runs = [torch.autograd.grad(run(given, 0, 1, "triton"), given, upstream) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@runs_kernel
def test_in_8_bits_it_is_what_fp8_makes_of_the_norm(poisoned):
    """Bit for bit; the tensor that is not written takes the gradient."""
    given = random(2, 9, 48, torch.bfloat16, torch.bfloat16)
    *state, y, residual, P, g, weight = given
    want, got = (
        altup_update_norm(state, y, residual, P, g, 0, weight, EPS, 1, "triton", low=low) for low in (False, True)
    )
    assert want.low is None
    assert got.low.scale == power_of_two(weight.detach().abs().amax() * 48**0.5, VALUE)
    q = quantize_reference(want.normed, got.low.scale, VALUE)
    assert torch.equal(got.low.q.view(torch.uint8), q.view(torch.uint8))
    upstream = [torch.randn_like(y) for _ in range(4)]
    gradients = [torch.autograd.grad([*x.state, x.residual, x.normed], given, upstream) for x in (want, got)]
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("d", [768, 1024, 2048])
def test_rows_stay_in_registers_and_are_read_sixteen_bytes_at_a_time(d, low, hopper):
    from altup.kernels.altup_update import norm_triton as kernels

    block = 1 << (d - 1).bit_length()
    arrays = dict.fromkeys(("y", "residual", "normed", "P", "g", "weight", "dy", "d_again", "d_normed"), "*bf16")
    types = arrays | dict.fromkeys(("outs", "xs", "dxs", "grads"), ("*bf16", "*bf16"))
    types |= {"rms": "*fp32", "partials": "*fp32", "sums": "*fp32", "rows": "i32", "eps": "fp32", "active": "i32"}
    types |= {"q": "*fp8e4nv" if low else None, "scale": "*fp32" if low else None, "root": "fp32"}
    both = (kernels.forward_kernel, kernels.TILE, 16), (kernels.backward_kernel, kernels.BACKWARD_TILE, 8)
    for kernel, tile, a_thread in both:
        rows = max(1, tile // block)
        constants = {"K": 2, "NEXT": 1, "D": d, "BLOCK": block, "ROWS": rows, "V": kernels.VECTOR, "LOW": low}
        given = {name: value for name, value in (types | constants).items() if name in kernel.arg_names}
        compiled = hopper.build(kernel, given, num_warps=kernels._warps(block * rows, a_thread))
        assert not hopper.spills(compiled)
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= (4 if kernel is kernels.forward_kernel else 8)
