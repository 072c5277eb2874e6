"""The feed-forward with GEGLU in its products: result and gradients against float64 on the same inputs."""

from __future__ import annotations

import pytest
import torch
from torch import library

from altup import kernels
from altup.core.errors import UserError
from altup.kernels.feed_forward import feed_forward, feed_forward_reference
from altup.kernels.feed_forward.op import feed_forward_op
from altup.nn import GatedFeedForward
from altup.nn.linear import join_maps
from tests.kernels.interpreter import DEVICE, INTERPRETED, fewer, needs_gpu, runs_kernel

TOLERANCE = {torch.float32: 1e-6 if INTERPRETED else 1e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}


def random(*shape, dtype=torch.float32):
    return (torch.randn(shape, device=DEVICE) * shape[-1] ** -0.25).to(dtype).requires_grad_()


def distances(given, implementation):
    """Of the result and of all gradients from float64's."""
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    got, want = feed_forward(*given, implementation=implementation), feed_forward_reference(*wide)
    upstream = torch.randn_like(got)
    gradients = [torch.autograd.grad(y, x, upstream.to(y.dtype)) for y, x in ((got, given), (want, wide))]
    pairs = [(got, want), *zip(*gradients, strict=True)]
    return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.float16], list(TOLERANCE)))
@pytest.mark.parametrize("sizes", [((3, 11), 16, 48), ((130,), 32, 64), *fewer([], [((9, 300), 256, 512)])])
def test_kernels(sizes, dtype, poisoned):
    tokens, d, hidden = sizes
    given = [random(*tokens, d, dtype=dtype), random(2 * hidden, d, dtype=dtype), random(d, hidden, dtype=dtype)]
    assert max(distances(given, "triton")) < TOLERANCE[dtype]


@runs_kernel
def test_an_operator_like_any_other():
    library.opcheck(feed_forward_op, (random(5, 16), random(32, 16), random(16, 16)))


def test_plain_and_refused():
    x, wi, wo = torch.randn(5, 6), torch.randn(14, 6), torch.randn(6, 7)
    assert torch.equal(feed_forward(x, wi, wo), feed_forward_reference(x, wi, wo))
    with pytest.raises(UserError, match="multiples of 16"):
        feed_forward(x, wi, wo, implementation="triton")


@needs_gpu
def test_a_module_that_joins_its_maps_takes_it(monkeypatch):
    """In bf16 under autocast with float32 weights, as in a run: nearly what it computes without."""
    monkeypatch.setattr(kernels.feed_forward, "SHORT", 256)
    torch.manual_seed(0)
    module = GatedFeedForward(256, 512).to(DEVICE)
    x = torch.randn(4, 300, 256, device=DEVICE).bfloat16().requires_grad_()

    def run():
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        y.square().sum().backward()
        return [y, dx, *(p.grad for p in module.parameters())]

    apart = run()
    join_maps(module)
    for one, other in zip(run(), apart, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() < 0.02 * other.double().norm()
