"""GEGLU and SwiGLU: the plain expressions, and the kernels, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altup.core.errors import UserError
from altup.kernels.dropout import sequence_factors
from altup.kernels.dropout.reference import keep_mask_reference
from altup.kernels.gated import gated, gated_reference
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, needs_gpu, runs_kernel

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def test_plain_is_the_expression_of_its_halves():
    gate, linear = torch.randn(2, 3, 5, dtype=torch.float64).unbind()
    h = torch.cat([gate, linear], -1)
    assert torch.equal(gated(h, "gelu", implementation="plain"), F.gelu(gate, approximate="tanh") * linear)
    assert torch.equal(gated(h, "silu", 0.5, training=False), F.silu(gate) * linear)


def test_refuses_what_no_kernel_takes():
    with pytest.raises(UserError, match="float64"):
        gated(torch.randn(2, 4, dtype=torch.float64), "silu", implementation="triton")
    with pytest.raises(UserError, match="'gelu', 'silu'"):
        gated(torch.randn(2, 4), "relu")


def compare(h, activation="gelu", p=0.0, per_sequence=False):
    wide = h.detach().double().requires_grad_()
    torch.manual_seed(3)
    keep = None
    if per_sequence:
        keep = sequence_factors(h[..., : h.shape[-1] // 2], p) > 0
    elif p:
        seed = torch.randint(2**62, (1,), device=DEVICE).item()
        keep = keep_mask_reference(h.numel() // 2, seed, p).view(*h.shape[:-1], -1).to(DEVICE)
    torch.manual_seed(3)
    got = gated(h, activation, p, implementation="triton", per_sequence=per_sequence)
    want = gated_reference(wide, activation, keep, p)
    upstream = torch.randn_like(got)
    pairs = [
        (got, want),
        *zip(*(torch.autograd.grad(y, x, upstream.to(y.dtype)) for y, x in ((got, h), (want, wide))), strict=True),
    ]
    for one, other in pairs:
        assert one.dtype == h.dtype
        assert (one.double() - other).norm() / other.norm() < TOLERANCE[h.dtype]


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.bfloat16], list(TOLERANCE)))
@pytest.mark.parametrize("shape", [(3, 2 * 40), (2, 5, 2 * 1000), (9, 2 * 1024), (1, 2 * 5000), (7, 2 * 3)])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_kernels(activation, shape, dtype, poisoned):
    compare((3 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_(), activation)


@runs_kernel
@pytest.mark.parametrize("shape", [(3, 2 * 40), (9, 2 * 1024)])
def test_dropout_is_that_of_the_mask(shape, poisoned):
    compare(torch.randn(shape, device=DEVICE).requires_grad_(), p=0.3)


@runs_kernel
@pytest.mark.parametrize("shape", [(3, 7, 2 * 40), (2, 5, 2 * 1024), (4, 1, 2 * 3)])
def test_dropout_that_tokens_of_a_sequence_share(shape, poisoned):
    compare(torch.randn(shape, device=DEVICE).requires_grad_(), "silu", 0.3, per_sequence=True)


@runs_kernel
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_large_gates_give_no_nan(activation):
    h = torch.tensor([[-1e4, 1e4, -1e3, 0.0, 1.0, 2.0, 3.0, 4.0]], device=DEVICE).requires_grad_()
    out = gated(h, activation, implementation="triton")
    assert torch.equal(out.detach().cpu(), torch.tensor([[-0.0, 2e4, -0.0, 0.0]]))
    assert torch.autograd.grad(out.sum(), h)[0].isfinite().all()


@runs_kernel
def test_operator_registrations():
    from altup.kernels.gated.triton import gated_backward, gated_op

    h = torch.randn(4, 6, device=DEVICE, requires_grad=True)
    check_operator(gated_op, h, None, 0.0, "silu")
    given = torch.randn(4, 3, device=DEVICE), h.detach(), None, 0.0, "gelu"
    check_operator(gated_backward, *given, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiles_as_one_graph():
    compiled = torch.compile(lambda h: gated(h, "silu", implementation="triton"), backend=BACKEND, fullgraph=True)
    h = torch.randn(4, 6, device=DEVICE)
    torch.testing.assert_close(compiled(h), gated_reference(h, "silu"))


@needs_gpu
@pytest.mark.parametrize("n", [2048, 2816])
@pytest.mark.parametrize(("activation", "p"), [("gelu", 0.0), ("gelu", 0.1), ("silu", 0.0)])
def test_training_sizes(n, activation, p, poisoned):
    compare(torch.randn(8, 512, 2 * n, device=DEVICE, dtype=torch.bfloat16).requires_grad_(), activation, p)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dropout", [None, "drawn", "shared"])
def test_numbers_are_read_and_written_sixteen_bytes_at_a_time(dropout, silu, hopper):
    from altup.kernels.gated import triton as kernels

    types = {"numel": "i32", "drop_below": "i32", "keep_scale": "fp32", "tokens": "i32"}
    types["seed"] = {"drawn": "*i64", "shared": "*fp32"}.get(dropout)
    constants = {"N": 2816, "V": 8, "DROPOUT": bool(dropout), "SHARED": dropout == "shared", "SILU": silu}
    constants["LANES"] = 1024
    for kernel, arrays in (
        (kernels.forward_kernel, ("hidden", "h")),
        (kernels.backward_kernel, ("d_h", "grad", "h")),
    ):
        compiled = hopper.build(
            kernel, dict.fromkeys(arrays, "*bf16") | types | constants, divisible=["numel"], num_warps=4
        )
        assert not hopper.spills(compiled)
        ptx = compiled.asm["ptx"]
        loads, stores = ptx.count("ld.global.v4.b32"), ptx.count("st.global.v4.b32")
        loads -= 8 * (dropout == "shared")  # the factors, in 32 bits
        assert (loads, stores) == ((8, 4) if kernel is kernels.forward_kernel else (12, 8)), (loads, stores)
