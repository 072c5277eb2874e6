"""Muon's kernels and the optimizer that uses them against the definition; the definition itself is compared with
singular values in tests/training/optimizers/test_muon.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altup.kernels import muon_reference
from altup.training.optimizers.muon import Muon
from tests.kernels.interpreter import DEVICE, INTERPRETED, fewer, needs_gpu, runs_kernel
from tests.kernels.optimizer_steps import (
    parameters,
    replayed_steps_are_the_launched_ones,
    set_gradients,
    skipped_steps_change_no_bit,
)

NEAR = 1e-4 if INTERPRETED else 0.03  # of an update: its matrices are multiplied in bf16 on a GPU
SHAPES = {"wide": (5, 70), "tall": (70, 5), "of several programs": (70, 64), "a pile": (3, 6, 10), "one": (1, 1)}


def build(weights, lr=0.05):
    return Muon([{"params": weights, "weight_decay": 0.1, "orthogonal": True}], lr=lr, betas=(0.9, 0.99), eps=1e-8)


@runs_kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", fewer([torch.float32], [torch.float32, torch.bfloat16]))
def test_steps_equal_the_definition(shape, dtype, poisoned):
    weights = parameters([SHAPES[shape]] * 3, dtype)
    optimizer = build(weights, lr=torch.tensor(0.05, device=DEVICE))
    for step in range(3):
        set_gradients(weights, step)
        assert all(optimizer._runs_matrix_kernels(p) for p in weights)
        states = [dict(optimizer.state[p]) for p in weights]
        expected = [
            muon_reference(
                p.detach().float(), p.grad.float(), state["momentum"].float(), lr=0.05, weight_decay=0.1,
                smallest=1e-3, largest=state["largest"],
            )
            for p, state in zip(weights, states, strict=True)
        ]  # fmt: skip
        before = [p.detach().float().clone() for p in weights]
        optimizer.step()
        for p, old, (weight, momentum) in zip(weights, before, expected, strict=True):
            torch.testing.assert_close(optimizer.state[p]["momentum"], momentum, rtol=1e-5, atol=1e-7)
            rounding = torch.finfo(dtype).eps * weight.norm() if dtype == torch.bfloat16 else 0
            assert (p.float() - weight).norm() <= NEAR * (weight - old).norm() + rounding
    assert [optimizer.state[p]["step"].item() for p in weights] == [3] * 3


@runs_kernel
def test_sizes_are_bounded():
    """Weights that have grown beyond ten times the size of their start are moved as if they had that."""
    weights = parameters([(6, 8)])
    optimizer = build(weights, lr=0.05)
    start = weights[0].detach().square().mean().sqrt()
    weights[0].data.mul_(1000)
    set_gradients(weights, 0)
    before = weights[0].detach() * (1 - 0.05 * 0.1)
    optimizer.step()
    moved = (weights[0].detach() - before).square().mean().sqrt() / (0.05 * 10 * start)
    assert 0.1 < moved < 0.3  # an update has an RMS of about 0.2


@runs_kernel
def test_a_skipped_step_changes_no_bit_whatever_the_gradients_are():
    weights = parameters([(6, 8)] * 3)
    skipped_steps_change_no_bit(weights, build(weights))


@runs_kernel
def test_what_the_kernels_cannot_read_takes_the_plain_path():
    whole = torch.randn(8, 9, device=DEVICE)
    weights = [nn.Parameter(whole.t()), *parameters([(9, 8)])]
    optimizer = build(weights)
    set_gradients(weights, 0)
    before = [p.detach().clone() for p in weights]
    optimizer.step()
    assert all((p != old).any() for p, old in zip(weights, before, strict=True))


@needs_gpu
def test_replayed_steps_are_the_launched_ones_bit_for_bit_and_nothing_waits():
    replayed_steps_are_the_launched_ones([(300, 301)] * 5, build)


@pytest.mark.parametrize("name", ["_momentum_kernel", "_descend_kernel"])
def test_kernels_compile_for_hopper_without_spills(name, hopper):
    from altup.kernels.muon import triton as kernels

    kernel = getattr(kernels, name)
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"momentum": "fp32", "decay": "fp32", "numel": "i32"}
    types |= dict.fromkeys(("grads", "momenta", "weights"), "*i64") | {"skip": "*u8", "BLOCK": kernels.BLOCK}
    types |= dict.fromkeys(("directions", "updates"), "*bf16")
    types = {argument: types[argument] for argument in kernel.arg_names}
    built = hopper.build(kernel, types, divisible=("numel",))
    assert not hopper.spills(built)
    assert "st.global.v4" in built.asm["ptx"]
