"""Map, residual addition, norm and next map as kernels: results and gradients against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import library

from altup import AltUpT5Config, AltUpT5ForConditionalGeneration
from altup.kernels.geglu.reference import geglu_reference
from altup.kernels.residual_maps import Unmapped, residual_maps, residual_maps_reference, takes_kernels
from altup.kernels.residual_maps.op import gated_map_op, residual_maps_op
from altup.models.stack import LayerStack, PreNormLayer
from altup.models.t5 import model as t5
from altup.nn.linear import join_maps
from tests.kernels.interpreter import DEVICE, INTERPRETED, fewer, runs_kernel

TOLERANCE = {torch.float32: 2e-6 if INTERPRETED else 2e-5, torch.bfloat16: 0.015, torch.float16: 3e-3}
EPS = 1e-6


def random(*shape, dtype=torch.float32, scale=None):
    return (torch.randn(shape, device=DEVICE) * (scale or shape[-1] ** -0.25)).to(dtype).requires_grad_()


def chain(given, kernels):
    """Two boundaries, of which the second is behind a GEGLU, and an update that is left to the end."""
    x, a, w, g1, wi, wo, g2, following, wi2, wo2, g3 = given
    if not kernels:
        x, h = residual_maps_reference(x, a, w, g1, EPS, wi)
        x, y = residual_maps_reference(x, h, wo, g2, EPS, following, gated=True)
        x, h = residual_maps_reference(x, y, w, g3, EPS, wi2)
        return x, geglu_reference(h) @ wo2.t()
    x, h, hidden = residual_maps(x, Unmapped(a, None, w), g1, EPS, wi, gates=True)
    x, y, nothing = residual_maps(x, Unmapped(h, hidden, wo), g2, EPS, following)
    assert nothing is None
    x, h, hidden = residual_maps(x, Unmapped(y, None, w), g3, EPS, wi2, gates=True)
    return x, Unmapped(h, hidden, wo2).map()


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.float32, torch.float16], list(TOLERANCE)))
@pytest.mark.parametrize(
    "sizes", [((3, 11), 16, 32, 48), ((70,), 32, 16, 32), *fewer([], [((9, 300), 256, 256, 512)])]
)
def test_kernels(sizes, dtype, poisoned):
    tokens, d, k, n = sizes
    norms = [(torch.rand(d, device=DEVICE) + 0.5).requires_grad_() for _ in range(3)]
    maps = [random(*shape, dtype=dtype) for shape in ((d, k), (2 * n, d), (d, n), (k, d), (2 * n, d), (d, n))]
    w, wi, wo, following, wi2, wo2 = maps
    x, a = random(*tokens, d, dtype=dtype), random(*tokens, k, dtype=dtype)
    given = [x, a, w, norms[0], wi, wo, norms[1], following, wi2, wo2, norms[2]]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    got, want = chain(given, True), chain(wide, False)
    upstream = [torch.randn_like(y) for y in got]
    gradients = [
        torch.autograd.grad(y, x, [grad.to(y[0].dtype) for grad in upstream])
        for y, x in ((got, given), (want, wide))
    ]
    for one, other in [*zip(got, want, strict=True), *zip(*gradients, strict=True)]:
        assert (one.double() - other).norm() / other.norm() < TOLERANCE[dtype]


@runs_kernel
def test_operators_like_any_other():
    x, a, w, g = random(5, 16), random(5, 16), random(16, 16), random(16, scale=1.0)
    library.opcheck(residual_maps_op, (x, a, None, w, g, random(32, 16), EPS, True))
    hidden = a.detach()
    library.opcheck(residual_maps_op, (x, random(5, 32), hidden, w, g, random(16, 16), EPS, False))
    library.opcheck(gated_map_op, (random(5, 32), hidden, w))


@runs_kernel
def test_rows_that_the_kernels_take():
    takes = {
        d: takes_kernels(torch.zeros(2, d, device=DEVICE), 32, implementation="triton")
        for d in (8, 16, 48, 256, 512)
    }
    assert takes == {8: False, 16: True, 48: False, 256: True, 512: False}
    assert not takes_kernels(torch.zeros(2, 16, device=DEVICE), 24, implementation="triton")
    assert not takes_kernels(torch.zeros(2, 16, device=DEVICE), implementation="plain")


@runs_kernel
@pytest.mark.parametrize(("widening", "blocks", "times"), [("none", 1, 8), ("altup", 2, 6)])
def test_layers_of_a_model_compute_the_same_with_them(widening, blocks, times, monkeypatch):
    """Loss and all gradients of a T5 with and without, in float32."""
    torch.manual_seed(0)
    config = AltUpT5Config(
        d_model=32, d_ff=48, d_kv=16, num_heads=2, num_layers=2, num_decoder_layers=2, vocab_size=40,
        dropout_rate=0.0, num_blocks=blocks, widening=widening,
    )  # fmt: skip
    model = AltUpT5ForConditionalGeneration(config).to(DEVICE).train()
    ids, labels = torch.randint(3, 40, (2, 9), device=DEVICE), torch.randint(3, 40, (2, 5), device=DEVICE)

    def gradients():
        model.zero_grad()
        loss = model(ids, labels=labels).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    apart = gradients()
    calls = []

    def counted(*given, **more):
        calls.append(given)
        return residual_maps(*given, **more)

    monkeypatch.setattr(t5, "residual_maps", counted)
    monkeypatch.setattr(t5, "takes_kernels", partial(takes_kernels, implementation="triton"))
    join_maps(model)
    for module in model.modules():
        if isinstance(module, PreNormLayer):
            module.fuses_norms = True
        if isinstance(module, LayerStack):
            module.hands_on = module.can_hand_on()
    for one, other in zip(gradients(), apart, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm() + 1e-7
    assert len(calls) == times
