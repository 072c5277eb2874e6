"""Muon's kernels and the optimizer that uses them against the definition; the definition itself is compared with
singular values in tests/training/optimizers/test_muon.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from altup.kernels import muon_reference
from altup.kernels.muon import orthogonalize, orthogonalized
from altup.kernels.muon.reference import iterate_newton_schulz
from altup.training.optimizers.muon import Muon
from tests.kernels.interpreter import DEVICE, INTERPRETED, fewer, needs_gpu, runs_kernel
from tests.kernels.optimizer_steps import (
    parameters,
    replayed_steps_are_the_launched_ones,
    set_gradients,
    skipped_steps_change_no_bit,
)

NEAR = 1e-4 if INTERPRETED else 0.03  # of an update: its matrices are multiplied in bf16 on a GPU
SHAPES = {  # of the matrices, and of the blocks that they are cut into
    "wide": ((5, 70), None),
    "tall": ((70, 5), None),
    "of several programs": ((70, 64), None),
    "a pile": ((3, 6, 10), None),
    "one": ((1, 1), None),
    "heads in rows": ((32, 70), (16, 70)),
    "heads in columns": ((70, 36), (70, 12)),
    "a grid of blocks": ((12, 20), (6, 5)),
    "blocks that are not flat": ((66, 130), (66, 65)),
}
QUICK = ("wide", "tall", "a pile", "heads in rows", "heads in columns", "a grid of blocks")
WIDE = {"several tiles": (150, 200), "whole tiles": (256, 768), "tall": (384, 256), "square": (256, 256)}


def build(weights, lr=0.05, block=None):
    group = {"params": weights, "weight_decay": 0.1, "orthogonal": True, "block": block}
    return Muon([group], lr=lr, betas=(0.9, 0.99), eps=1e-8)


@runs_kernel
@pytest.mark.parametrize("shape", fewer(QUICK, SHAPES))
@pytest.mark.parametrize("dtype", fewer([torch.float32], [torch.float32, torch.bfloat16]))
def test_steps_equal_the_definition(shape, dtype, poisoned):
    whole, block = SHAPES[shape]
    weights, steps = parameters([whole] * fewer(2, 3), dtype), fewer(2, 3)
    optimizer = build(weights, lr=torch.tensor(0.05, device=DEVICE), block=block)
    for step in range(steps):
        set_gradients(weights, step)
        assert all(optimizer._runs_matrix_kernels(p) for p in weights)
        states = [dict(optimizer.state[p]) for p in weights]
        expected = [
            muon_reference(
                *(t.detach().double().cpu() for t in (p, p.grad, state["momentum"])), lr=0.05, weight_decay=0.1,
                smallest=1e-3, largest=state["largest"].double().cpu(), block=block,
            )
            for p, state in zip(weights, states, strict=True)
        ]  # fmt: skip
        before = [p.detach().double().cpu() for p in weights]
        optimizer.step()
        for p, old, (weight, momentum) in zip(weights, before, expected, strict=True):
            found = optimizer.state[p]["momentum"].double().cpu()
            torch.testing.assert_close(found, momentum, rtol=1e-5, atol=1e-7)
            rounding = torch.finfo(dtype).eps * weight.norm()
            assert (p.double().cpu() - weight).norm() <= NEAR * (weight - old).norm() + rounding
    assert [optimizer.state[p]["step"].item() for p in weights] == [steps] * len(weights)


@runs_kernel
def test_shapes_taken_together_are_those_taken_alone(monkeypatch):
    """To the last bit; tiles of another size only nearly."""
    shapes = [(40, 33), (33, 33), (33, 70), (70, 40), (3, 33, 33)]

    def after_two_steps():
        weights = [p for shape in shapes for p in parameters([shape] * 2)]
        optimizer = build(weights)
        for step in range(2):
            set_gradients(weights, step)
            optimizer.step()
        return [p.detach().clone() for p in weights]

    together = after_two_steps()
    monkeypatch.setattr("altup.kernels.muon.triton.TOGETHER", 0)
    alone = after_two_steps()
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr("altup.kernels.muon.gram.SMALL_TILE", 32)
    for one, other in zip(after_two_steps(), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=fewer(1e-5, 2e-3))


def unequal(shape, power=1.0):
    """A matrix of norm 1 with singular values like 1, 2^-power, 3^-power, …; and orthogonalized, in float64."""
    generator = torch.Generator().manual_seed(0)
    flat = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(size, flat, generator=generator, dtype=torch.float64))[0] for size in shape
    )
    values = torch.arange(1, flat + 1, dtype=torch.float64) ** -power
    x = (left * values) @ right.mT
    return x / x.norm(), iterate_newton_schulz(x / x.norm())


@runs_kernel
@pytest.mark.parametrize("shape", fewer(["several tiles"], WIDE))
def test_unequal_singular_values_survive_float16(shape):
    """Without a restart of the iterations the small ones are lost in the rounding of the large ones' squares."""
    from altup.kernels.muon.gram import iterate_gram

    x, expected = unequal(WIDE[shape])
    (found,) = iterate_gram(torch.stack([x, 0.5 * x]).to(DEVICE, torch.float16))
    found = found.double().cpu()
    assert (found[0] - expected).norm() < 0.01 * expected.norm()
    again = iterate_newton_schulz(0.5 * x)
    assert (found[1] - again).norm() < 0.01 * again.norm()


@needs_gpu
@pytest.mark.parametrize("block", [None, (50, 200), (150, 40)])
def test_orthogonalized_on_a_gpu(block):
    """As FSDP's shards are; whatever the size of a gradient."""
    x, _ = unequal(WIDE["several tiles"])
    found = orthogonalize(torch.stack([x, 1e-6 * x]).to(DEVICE, torch.float32), block).double().cpu()
    expected = orthogonalized(x, block)
    for one in found:
        assert (one - expected).norm() < 0.03 * expected.norm()


@runs_kernel
@pytest.mark.parametrize("tall", [False, True])
def test_blocks_of_unequal_singular_values(tall):
    """Directions are 16-bit numbers on a GPU. What becomes of these is compared, not of those before rounding:
    that changes the small singular values of such a matrix, and the update by a tenth."""
    from altup.kernels.multi_tensor import step_scalars, tensor_list
    from altup.kernels.muon.blocks import descend_by_blocks

    dtype = fewer(torch.float16, torch.bfloat16)  # the interpreter cannot multiply bfloat16
    x = unequal((64, 200), power=2.0)[0].to(DEVICE, dtype)
    if tall:
        x = x.mT.contiguous()
    weight = torch.ones(x.shape, device=DEVICE)
    lr, skip = step_scalars(0.5, None, x.device)
    descend_by_blocks(
        tensor_list([weight]), x[None], (x.shape[0], x.shape[1]), torch.full((1,), 2.0, device=DEVICE),
        lr=lr, skip=skip.view(torch.uint8), weight_decay=0.2,
    )  # fmt: skip
    expected = orthogonalized(x.double().cpu())
    assert (0.9 - weight.double().cpu() - expected).norm() < 0.01 * expected.norm()


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
@pytest.mark.parametrize("block", [None, (3, 8)])
def test_a_skipped_step_changes_no_bit_whatever_the_gradients_are(block):
    weights = parameters([(6, 8)] * 3)
    skipped_steps_change_no_bit(weights, build(weights, block=block))


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
@pytest.mark.parametrize("block", [None, (60, 301)])
def test_replayed_steps_are_the_launched_ones_bit_for_bit_and_nothing_waits(block):
    replayed_steps_are_the_launched_ones([(300, 301)] * 5, partial(build, block=block))


@pytest.mark.parametrize("tall", [False, True])
def test_products_compile_for_hopper_without_spills(tall, hopper):
    """Also for sizes that are no whole tiles, where spills are allowed."""
    from altup.kernels.muon import blocks, gram

    types = dict.fromkeys(("left", "right", "added", "out"), "*fp16") | dict.fromkeys("mk", "i32")
    types |= dict.fromkeys(("alpha", "beta", "gamma"), "fp32") | {"TALL": tall, "ADDS": True, "EVEN": True}
    types |= {"TILE": gram.TILE, "STEP": gram.STEP}
    options = {"num_warps": gram.WARPS, "num_stages": gram.STAGES}
    assert "wgmma" in hopper.build(gram._symmetric_kernel, types | {"EVEN": False}, **options).asm["ptx"]
    built = hopper.build(gram._symmetric_kernel, types, divisible="mk", **options)
    assert hopper.stack_bytes(built) <= 16  # behind the loop
    assert "wgmma" in built.asm["ptx"]

    sizes = ("numel", "columns", "flat", "long", "along")
    types = dict.fromkeys(blocks._blocks_kernel.arg_names, "*fp32") | dict.fromkeys(sizes, "i32")
    types |= dict.fromkeys(("decay", "a", "b", "c"), "fp32") | {"skip": "*u8", "weights": "*i64"}
    types |= {"directions": "*bf16", "ITERATIONS": 5, "TALL": tall, "FLAT": blocks.FLATTEST, "LONG": blocks.LONG}
    built = hopper.build(blocks._blocks_kernel, types, divisible=sizes[:-1], num_warps=4)
    assert not hopper.spills(built)
    assert "wgmma" in built.asm["ptx"]


@pytest.mark.parametrize("name", ["_momentum_kernel", "_normalize_kernel", "_descend_kernel"])
def test_kernels_compile_for_hopper_without_spills(name, hopper):
    from altup.kernels.muon import triton as kernels

    kernel = getattr(kernels, name)
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"momentum": "fp32", "decay": "fp32", "numel": "i32"}
    types |= dict.fromkeys(("grads", "momenta", "weights"), "*i64") | {"skip": "*u8", "BLOCK": kernels.BLOCK}
    types |= dict.fromkeys(("directions", "updates", "out"), "*bf16")
    types = {argument: types[argument] for argument in kernel.arg_names}
    built = hopper.build(kernel, types, divisible=("numel",))
    assert not hopper.spills(built)
    assert "st.global.v4" in built.asm["ptx"]
