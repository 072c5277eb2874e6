"""AdamW-RMS: the definition by hand, and the kernels and the optimizer's plain path against it in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from altup.core.errors import UserError
from altup.kernels import adamw_reference, adamw_update
from altup.training.optimizers.adamw import RelativeAdamW
from altup.training.optimizers.muon import Muon
from tests.kernels.interpreter import DEVICE, needs_gpu, runs_kernel
from tests.kernels.optimizer_steps import (
    everything,
    parameters,
    replayed_steps_are_the_launched_ones,
    set_gradients,
    skipped_steps_change_no_bit,
)

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "smallest": 1e-3}


def test_the_definition_by_hand():
    """Two numbers, two steps, from the formula."""
    w, m, v = [2.0, -1.0], [0.0, 0.0], [0.0, 0.0]
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in (w, m, v)]
    for t, g in enumerate(([0.5, -3.0], [-0.1, 2.0]), start=1):
        tensors = list(adamw_reference(tensors[0], torch.tensor(g).double(), *tensors[1:], t, **OPTIONS))
        rms = math.sqrt((w[0] ** 2 + w[1] ** 2) / 2)
        for i in range(2):
            m[i] = 0.9 * m[i] + 0.1 * g[i]
            v[i] = 0.99 * v[i] + 0.01 * g[i] ** 2
            direction = m[i] / (1 - 0.9**t) / (math.sqrt(v[i] / (1 - 0.99**t)) + 1e-8)
            w[i] = w[i] - 0.02 * 0.1 * w[i] - 0.02 * rms * direction
    for got, want in zip(tensors, (w, m, v), strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_tiny_tensor_moves_by_the_smallest_rms():
    tiny, g = torch.full((4,), 1e-6), torch.ones(4)
    new, _, _ = adamw_reference(tiny, g, 0 * g, 0 * g, 1, **OPTIONS | {"weight_decay": 0.0})
    torch.testing.assert_close(new, tiny - 0.02 * 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_plain_optimizer_takes_the_steps_of_the_definition(dtype):
    """Stacked or one by one; a skipped step changes nothing."""
    shapes = [(3, 5), (3, 5), (7,), ()]
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = RelativeAdamW(weights, **{k: v for k, v in OPTIONS.items() if k != "smallest"})
    wide = torch.promote_types(dtype, torch.float32)
    copies = [p.detach().clone() for p in weights]
    means, squares = ([torch.zeros(shape, dtype=wide) for shape in shapes] for _ in range(2))
    steps = [torch.zeros(()) for _ in shapes]
    for step in range(3):
        skip = torch.tensor(step == 1)
        for p in weights:
            p.grad = torch.randn(p.shape).to(dtype)
        adamw_update(copies, [p.grad for p in weights], means, squares, steps, skip=skip, **OPTIONS)
        optimizer.step(skip=skip)
        for p, copy in zip(weights, copies, strict=True):
            torch.testing.assert_close(p.detach(), copy, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-9)
    assert [int(step) for step in steps] == [2] * 4


def test_kernels_asked_for_where_they_cannot_run_are_refused():
    w, step = torch.ones(3, dtype=torch.float64), torch.zeros(())
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        adamw_update([w], [w], [w], [w], [step], implementation="triton", **OPTIONS)


SHAPES = {
    "single numbers": [(), (1,), (1, 1)],
    "of one size, not of one shape": [(17,), (17, 1), (1, 17)],
    "many": [(5,)] * 12,
    "of many sizes": [(2047,), (32, 64), (2049,), (2, 33, 35), (3,), (17,), ()],
}


def copies(weights):
    """In float64, for which there is no kernel."""
    return [nn.Parameter(p.detach().double()) for p in weights]


def build(weights, betas=(0.9, 0.999), lr=0.02, kind=RelativeAdamW):
    half = len(weights) // 2
    groups = [{"params": weights[:half], "weight_decay": 0.1}, {"params": weights[half:], "weight_decay": 0.0}]
    groups = [{**group, "orthogonal": False} for group in groups if group["params"]]  # known to Muon alone
    return kind(groups, lr=lr, betas=betas, eps=1e-8)


def uses_kernels(optimizer):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer._runs_kernels(p, p.grad) for p in held]


def compare_steps(weights, betas=(0.9, 0.999), lr=0.02, steps=3, kind=RelativeAdamW):
    """Each from the same weights, because of what bfloat16 rounds away."""
    plain = copies(weights)
    optimizer, reference = build(weights, betas, lr, kind), build(plain, betas, kind=kind)
    for step in range(steps):
        set_gradients(weights, step)
        for p, wide in zip(weights, plain, strict=True):
            wide.data.copy_(p.detach())
            wide.grad = p.grad.double()
        skip = torch.tensor(step == 1, device=DEVICE)
        optimizer.step(skip=skip)
        reference.step(skip=skip)
        for p, wide in zip(weights, plain, strict=True):
            kind = torch.finfo(p.dtype)
            lost = max(kind.eps, 1e-6) * wide.abs().max() + kind.eps * kind.smallest_normal
            assert (p - wide).abs().max() <= lost
            for name, moment in optimizer.state[p].items():
                assert moment.dtype == torch.float32
                expected = reference.state[wide][name].double()
                assert (moment - expected).abs().max() <= 1e-6 * expected.abs().max(), name
    assert all(optimizer.state[p]["step"] == steps - 1 for p in weights)
    return optimizer, reference


@runs_kernel
@pytest.mark.parametrize(
    ("shapes", "dtype", "kind"),
    [
        *((name, torch.float32, RelativeAdamW) for name in SHAPES),
        ("of many sizes", torch.bfloat16, RelativeAdamW),
        ("of many sizes", torch.float16, RelativeAdamW),
        ("of many sizes", torch.float32, Muon),  # which bounds the size
    ],
)
def test_steps_equal_the_definition(shapes, dtype, kind, poisoned):
    weights = parameters(SHAPES[shapes], dtype)
    optimizer, reference = compare_steps(weights, lr=torch.tensor(0.02, device=DEVICE), kind=kind)
    assert all(uses_kernels(optimizer))
    assert not any(uses_kernels(reference))


@runs_kernel
@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.3, 0.0)])
def test_other_decays_of_the_moments(betas):
    compare_steps(parameters(SHAPES["of one size, not of one shape"]), betas)


@runs_kernel
def test_more_parts_than_are_added_at_a_time(monkeypatch):
    from altup.kernels.adamw import triton as kernels

    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "PARTS", 16)
    compare_steps(parameters([(4097,), (4097,)]), steps=2)


@runs_kernel
def test_what_the_kernels_cannot_read_is_updated_beside_the_others():
    whole = torch.randn(8, 9, device=DEVICE)
    weights = [nn.Parameter(whole.t()), nn.Parameter(torch.randn(72, device=DEVICE)[3:]), *parameters([(8, 9)])]
    optimizer, _ = compare_steps(weights)
    assert uses_kernels(optimizer) == [False, False, True]


@runs_kernel
def test_a_skipped_step_changes_no_bit_whatever_the_gradients_are():
    weights = parameters([(4097,), (17,), (1, 17)])
    skipped_steps_change_no_bit(weights, build(weights))


@runs_kernel
def test_a_parameter_without_gradient_is_left_alone():
    weights = parameters([(17,)] * 4)
    optimizer = build(weights)
    set_gradients(weights, 0)
    weights[1].grad = None
    before = everything(weights, optimizer)
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, everything(weights, optimizer), strict=True)]
    assert changed == [True] * 4 + [False] * 4 + [True] * 8


@needs_gpu
def test_replayed_steps_are_the_launched_ones_bit_for_bit_and_nothing_waits():
    replayed_steps_are_the_launched_ones([(300, 301)] * 3 + SHAPES["of many sizes"], build)


ADDRESSES = ("weights", "grads", "means", "squares", "steps", "largest")
NUMBERS = ("log_beta1", "log_beta2", "smallest", "fresh1", "fresh2", "eps", "decay")


def compiled(hopper, kernel, dtype, **constants):
    """For weights and gradients of `dtype`, as many as a multiple of 16."""
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(NUMBERS, "fp32")
    types |= dict.fromkeys(ADDRESSES, "*i64") | dict.fromkeys(("weight_like", "grad_like"), f"*{dtype}")
    types |= {"numel": "i32", "count": "i32", "skip": "*u8"}
    return hopper.build(kernel, types | constants, divisible=("numel",))


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("bf16", 2)])
def test_passes_move_16_bytes_at_a_time(dtype, bytes_each, hopper):
    from altup.kernels.adamw import triton as kernels

    threads = 128
    vectors = kernels.BLOCK * bytes_each // (16 * threads)
    wide = kernels.BLOCK * 4 // (16 * threads)  # of moments

    squares = compiled(hopper, kernels._squares_kernel, dtype, BLOCK=kernels.BLOCK)
    assert not hopper.spills(squares)
    assert squares.asm["ptx"].count("ld.global.v4") == vectors

    descend = compiled(hopper, kernels._descend_kernel, dtype, BLOCK=kernels.BLOCK)
    assert not hopper.spills(descend)
    assert descend.asm["ptx"].count("ld.global.v4") == 2 * vectors + 2 * wide
    assert descend.asm["ptx"].count("st.global.v4") == vectors + 2 * wide


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("ones", [{}, {"count": 1}, {"numel": 1, "count": 1}])  # which Triton makes constants
def test_the_sum_of_parts(ones, bounded, hopper):
    from altup.kernels.adamw import triton as kernels

    constants = {"BOUNDED": bounded, "PARTS": kernels.PARTS, **ones}
    assert not hopper.spills(compiled(hopper, kernels._count_kernel, "fp32", **constants))


@pytest.mark.parametrize("name", ["_squares_kernel", "_descend_kernel"])
def test_single_numbers(name, hopper):
    from altup.kernels.adamw import triton as kernels

    assert not hopper.spills(compiled(hopper, getattr(kernels, name), "fp32", BLOCK=kernels.BLOCK, numel=1))
