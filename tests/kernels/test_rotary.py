"""Rotary positions of joined queries, keys and values: the plain expressions, and the kernels against float64."""

from __future__ import annotations

import math
import re

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.rotary import rotary_heads, rotary_heads_reference
from altup.nn.positions import rotation
from tests.kernels.interpreter import BACKEND, CHEAP_CHECKS, DEVICE, check_operator, fewer, needs_gpu, runs_kernel

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def test_pairs_are_turned_as_complex_numbers_and_values_stay():
    joined = torch.randn(2, 5, (4 + 2 * 2) * 6, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 1, 0, 2]])
    q, k, v = rotary_heads(joined, *rotation(positions, 6, theta=100.0), 4, 2)
    heads = joined.view(2, 5, 8, 6)
    turn = torch.exp(1j * positions[:, :, None, None] * 100.0 ** -torch.tensor([0, 1 / 3, 2 / 3]))
    complex_heads = torch.complex(heads[..., :3], heads[..., 3:]) * turn
    want = torch.cat([complex_heads.real, complex_heads.imag], -1)
    torch.testing.assert_close(torch.cat([q, k], 1).transpose(1, 2), want[:, :, :6], rtol=1e-6, atol=1e-6)
    assert torch.equal(v.transpose(1, 2), heads[:, :, 6:])


def test_scores_depend_on_distances_alone():
    joined = torch.randn(1, 6, (1 + 2) * 8, dtype=torch.float64)
    here, far = (
        rotary_heads(joined, *(x.double() for x in rotation(torch.arange(6)[None] + start, 8)), 1, 1)
        for start in (0, 1000)
    )
    scores = [q @ k.transpose(2, 3) for q, k, _ in (here, far)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_refuses_what_no_kernel_takes():
    angles = rotation(torch.arange(3)[None], 4)
    with pytest.raises(UserError, match="float64"):
        rotary_heads(torch.randn(1, 3, 12, dtype=torch.float64), *angles, 1, 1, "triton")


def compare(joined, angles, queries, keys, lay_out=lambda x: x):
    """`lay_out` is what becomes of the gradients, which attention makes in a layout of its own."""
    wide = joined.detach().double().requires_grad_()
    got = rotary_heads(joined, *angles, queries, keys, "triton")
    want = rotary_heads_reference(wide, *(x.double() for x in angles), queries, keys)
    upstream = [lay_out(torch.randn_like(x)) for x in got]
    (d_got,) = torch.autograd.grad(got, joined, upstream)
    (d_want,) = torch.autograd.grad(want, wide, [x.double() for x in upstream])
    for one, other in [*zip(got, want, strict=True), (d_got, d_want)]:
        assert one.dtype == joined.dtype
        assert one.shape == other.shape
        assert (one.double() - other).norm() / other.norm() < TOLERANCE[joined.dtype]


def draw(batch, tokens, queries, keys, width, dtype):
    joined = torch.randn(batch, tokens, (queries + 2 * keys) * width, device=DEVICE)
    return joined.to(dtype).requires_grad_()


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.bfloat16], list(TOLERANCE)))
@pytest.mark.parametrize(("queries", "keys", "width"), [(4, 1, 8), (3, 3, 12), (1, 1, 2)])
@pytest.mark.parametrize("rows", [1, 2])
def test_kernels(rows, queries, keys, width, dtype, poisoned):
    positions = torch.randint(50, (rows, 3), device=DEVICE)
    compare(draw(2, 3, queries, keys, width, dtype), rotation(positions, width), queries, keys)


@runs_kernel
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_gradients_in_any_layout(order, poisoned):
    """The permutations of [batch, heads, tokens, width] in which attention may write them."""

    def lay_out(x):
        back = [order.index(i) for i in range(4)]
        return x.permute(order).contiguous().permute(back)

    angles = rotation(torch.arange(4, device=DEVICE)[None], 6)
    compare(draw(2, 4, 3, 2, 6, torch.float32), angles, 3, 2, lay_out)


@runs_kernel
def test_backward_undoes_forward():
    """Turning is orthogonal: the gradient of half the squared results is the input."""
    joined = draw(1, 5, 2, 1, 8, torch.float32)
    angles = rotation(torch.arange(5, device=DEVICE)[None], 8, theta=math.e)
    half = sum((x**2).sum() for x in rotary_heads(joined, *angles, 2, 1, "triton")) / 2
    torch.testing.assert_close(torch.autograd.grad(half, joined)[0], joined.detach())


@runs_kernel
def test_operator_registrations():
    from altup.kernels.rotary.triton import rotary_backward, rotary_op

    joined, angles = draw(2, 3, 2, 1, 4, torch.float32), rotation(torch.arange(3, device=DEVICE)[None], 4)
    check_operator(rotary_op, joined, *angles, 2, 1)
    grads = [torch.randn(2, 3, heads, 4, device=DEVICE) for heads in (2, 1, 1)]
    check_operator(rotary_backward, *grads, *angles, 2, 1, checks=CHEAP_CHECKS)


@runs_kernel
def test_compiles_as_one_graph():
    angles = rotation(torch.arange(3, device=DEVICE)[None], 4)
    joined = torch.randn(2, 3, 4 * 4, device=DEVICE)
    compiled = torch.compile(lambda x: rotary_heads(x, *angles, 2, 1, "triton"), backend=BACKEND, fullgraph=True)
    torch.testing.assert_close(compiled(joined), rotary_heads_reference(joined, *angles, 2, 1))


@needs_gpu
@pytest.mark.parametrize(("queries", "keys", "width"), [(16, 4, 64), (32, 8, 128), (12, 12, 80)])
def test_training_sizes(queries, keys, width, poisoned):
    angles = rotation(torch.arange(2048, device=DEVICE)[None], width)
    compare(draw(4, 2048, queries, keys, width, torch.bfloat16), angles, queries, keys)


@pytest.mark.parametrize("width", [64, 128])
def test_numbers_are_read_and_written_sixteen_bytes_at_a_time(width, hopper):
    from altup.kernels.rotary import triton as kernels

    strides = [f"{x}_{axis}" for x in "qkv" for axis in ("row", "token", "head")]
    types = dict.fromkeys((*strides, "tokens", "period"), "i32")
    constants = {"Q": 16, "K": 4, "D": width, "HEADS": 32, "HALF": width // 2}
    angles = dict.fromkeys(("cosine", "sine"), "*fp32")
    for kernel, arrays in (
        (kernels.forward_kernel, ("q", "k", "v", "joined")),
        (kernels.backward_kernel, ("d_joined", "d_q", "d_k", "d_v")),
    ):
        given = dict.fromkeys(arrays, "*bf16") | types | constants | angles
        compiled = hopper.build(kernel, given, divisible=strides, num_warps=kernels.WARPS)
        assert not hopper.spills(compiled)
        ptx = compiled.asm["ptx"]
        assert not re.search(r"(ld|st)\.global\.(v2\.)?b(16|32) ", ptx), "a narrow access"
        assert len(re.findall(r"(?:ld|st)\.global\.v4\.b32", ptx)) >= 8 * width // 64
