"""Addition and norm: the plain expression, and the kernels, forward and every gradient, against float64."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.add_norm import add_norm, add_norm_fp8, add_norm_reference, kept_in_fours
from altup.kernels.dropout import sequence_factors
from altup.kernels.fp8.reference import VALUE, power_of_two, quantize_reference
from altup.nn import RMSNorm
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, needs_gpu, runs_kernel

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
EPS = 1e-6


def test_plain_is_an_addition_and_the_norm_of_the_models():
    norm = RMSNorm(12, EPS)
    torch.nn.init.normal_(norm.weight)
    x, update = torch.randn(2, 3, 5, 12).unbind()
    total, normed = add_norm(x, update, norm.weight, norm.eps)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, norm(x + update))


def test_kept_in_fours_is_even_handed():
    keep = kept_in_fours(40_000, 123456789012345, 0.3).double()
    assert abs(keep.mean() - 0.7) < 4 * (0.21 / keep.numel()) ** 0.5
    assert (keep.view(-1, 4).mean(0) - 0.7).abs().max() < 5 * (0.21 / 10_000) ** 0.5
    parts = keep.view(-1, 4) - 0.7
    assert (parts.t() @ parts / len(parts) / 0.21 - torch.eye(4)).abs().max() < 0.05


def test_refuses_what_no_kernel_takes():
    with pytest.raises(UserError, match="float64"):
        add_norm(*torch.randn(2, 3, 4, dtype=torch.float64), torch.ones(4), EPS, implementation="triton")


def inputs(rows, d, dtype=torch.float32, weight_dtype=None):
    x, update = (torch.randn(rows, d, device=DEVICE).mul(3).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(d, device=DEVICE).to(weight_dtype or dtype).requires_grad_()
    return [x, update, weight]


def compare(given, p=0.0, run=add_norm, per_sequence=False):
    wide = [x.detach().double().requires_grad_() for x in given]
    keep = None
    torch.manual_seed(3)
    if per_sequence:
        keep = sequence_factors(given[1], p) > 0
    elif p:
        seed = torch.randint(2**62, (1,), device=DEVICE).item()
        keep = kept_in_fours(given[0].numel(), seed, p).view(given[0].shape).to(DEVICE)
    torch.manual_seed(3)
    got = run(*given, EPS, p, implementation="triton", **({"per_sequence": True} if per_sequence else {}))
    want = add_norm_reference(*wide, EPS, keep, p)
    upstream = [torch.randn_like(y) for y in got]
    gradients = torch.autograd.grad(got, given, upstream)
    exact = torch.autograd.grad(want, wide, [g.double() for g in upstream])
    for one, other, like in zip([*got, *gradients], [*want, *exact], [given[0], given[0], *given], strict=True):
        assert one.dtype == like.dtype
        assert one.shape == like.shape
        assert (one.double() - other).norm() / other.norm() < TOLERANCE[given[0].dtype]


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.bfloat16], list(TOLERANCE)))
@pytest.mark.parametrize(("rows", "d"), [(1, 4), (7, 48), (9, 768), (3, 1028), (2, 5000)])
def test_kernels(rows, d, dtype, poisoned):
    compare(inputs(rows, d, dtype))


@runs_kernel
def test_weights_of_another_dtype(poisoned):
    compare(inputs(5, 64, torch.bfloat16, torch.float32))


@runs_kernel
def test_programs_walk_through_many_rows(poisoned, monkeypatch):
    from altup.kernels.add_norm import triton as kernels

    monkeypatch.setattr(kernels, "BACKWARD_TILE", 128)
    monkeypatch.setattr(kernels, "PROGRAMS_PER_SM", 3)
    monkeypatch.setattr(kernels, "SUMMED", (2, 16))
    compare(inputs(fewer(29, 20_029), 60))


@runs_kernel
@pytest.mark.parametrize(("rows", "d"), [(7, 48), (5, 1028)])
def test_dropout_is_that_of_the_mask(rows, d, poisoned):
    compare(inputs(rows, d), 0.3)


@runs_kernel
@pytest.mark.parametrize(("sequences", "tokens", "d"), [(3, 7, 48), (2, 5, 1028), (4, 1, 16)])
def test_dropout_that_tokens_of_a_sequence_share(sequences, tokens, d, poisoned):
    x, update, weight = inputs(sequences * tokens, d)
    x, update = (y.detach().view(sequences, tokens, d).requires_grad_() for y in (x, update))
    compare([x, update, weight], 0.3, per_sequence=True)


@runs_kernel
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_in_8_bits_it_is_what_fp8_makes_of_the_norm(weight_dtype, poisoned):
    """Bit for bit as with the norm's bound; the tensor that is not written takes the gradient."""
    given = inputs(9, 48, torch.bfloat16, weight_dtype)
    norm = RMSNorm(48, EPS)
    norm.weight = torch.nn.Parameter(given[2].detach())
    want_total, want = add_norm(*given, EPS, implementation="triton")
    total, normed, q, scale = add_norm_fp8(*given, EPS)
    assert torch.equal(total, want_total)
    assert scale == power_of_two(norm.bound(), VALUE)
    assert torch.equal(q.view(torch.uint8), quantize_reference(want, scale, VALUE).view(torch.uint8))
    upstream = [torch.randn_like(total), torch.randn_like(total)]
    got = torch.autograd.grad([total, normed], given, upstream)
    for a, b in zip(got, torch.autograd.grad([want_total, want], given, upstream), strict=True):
        assert torch.equal(a, b)


@runs_kernel
def test_operator_registrations():
    from altup.kernels.add_norm.triton import add_norm_backward, add_norm_op

    x, update, weight = inputs(3, 8)
    check_operator(add_norm_op, x, update, weight, None, EPS, 0.0, False)
    check_operator(add_norm_op, x, update, weight, None, EPS, 0.0, True, checks="test_faketensor")
    total, _, rms = add_norm_op(x.detach(), update.detach(), weight.detach(), None, EPS, 0.0, False)[:3]
    given = torch.randn_like(total), torch.randn_like(total), total, rms, weight.detach(), None, 0.0
    check_operator(add_norm_backward, *given, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiles_as_one_graph():
    def run(*given, **options):
        return add_norm(*given, **options)

    compare(inputs(5, 16), run=torch.compile(run, backend=BACKEND, fullgraph=True))


@needs_gpu
@pytest.mark.parametrize("d", [768, 1024, 2048])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_training_sizes(d, p, poisoned):
    compare(inputs(8192, d, torch.bfloat16), p)


@needs_gpu
def test_two_runs_give_the_same_bits():
    given = inputs(32768, 768, torch.bfloat16)
    upstream = [torch.randn(32768, 768, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    runs = [torch.autograd.grad(add_norm(*given, EPS), given, upstream) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("d", [768, 2048])
@pytest.mark.parametrize(("dropout", "low"), [(None, False), ("drawn", False), ("shared", False), (None, True)])
def test_rows_stay_in_registers_and_are_read_sixteen_bytes_at_a_time(dropout, low, d, hopper):
    from altup.kernels.add_norm import triton as kernels

    block = 1 << (d - 1).bit_length()
    arrays = dict.fromkeys(
        ("total", "normed", "x", "update", "weight", "dx", "d_update", "d_total", "d_normed"), "*bf16"
    )
    types = arrays | {"rms": "*fp32", "sums": "*fp32", "rows": "i32", "eps": "fp32", "drop_below": "i32"}
    types |= {"keep_scale": "fp32", "root": "fp32", "tokens": "i32"}
    types["seed"] = {"drawn": "*i64", "shared": "*fp32"}.get(dropout)
    types |= {"q": "*fp8e4nv" if low else None, "scale": "*fp32" if low else None}
    for kernel, tile in ((kernels.forward_kernel, kernels.TILE), (kernels.backward_kernel, kernels.BACKWARD_TILE)):
        constants = {"D": d, "BLOCK": block, "ROWS": max(1, tile // block), "LOW": low}
        constants |= {"DROPOUT": bool(dropout), "SHARED": dropout == "shared"}
        given = {name: value for name, value in (types | constants).items() if name in kernel.arg_names}
        compiled = hopper.build(kernel, given, num_warps=kernels.WARPS)
        assert not hopper.spills(compiled)
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 4
        assert "ld.global.b16" not in compiled.asm["ptx"]
