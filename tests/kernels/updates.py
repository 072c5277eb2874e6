"""What tests of the fused updates share: how close they must come, and questions that are the same for all."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from tests.kernels.interpreter import DEVICE

# One rounding of the result, and sums in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SUM_TOLERANCE = 2e-5  # coefficients' gradients: long sums


def checkpointed(fused, reentrant):
    """`fused(blocks, ...)` of two blocks, recomputed in the backward pass."""

    def run(blocks, *rest):
        return checkpoint(lambda *args: fused(args[:2], *args[2:]), *blocks, *rest, use_reentrant=reentrant)

    return run


def assert_same_backward(fused, run, blocks, *rest):
    """Reentrant checkpointing gives no gradients through autograd.grad, so `run` is asked through backward."""
    inputs = [*blocks, *(tensor for tensor in rest if isinstance(tensor, torch.Tensor))]
    want = torch.autograd.grad(sum((x**2).sum() for x in fused(blocks, *rest)), inputs)
    sum((x**2).sum() for x in run(blocks, *rest)).backward()
    assert all(torch.equal(t.grad, w) for t, w in zip(inputs, want, strict=True))


def assert_autocast_rounds_nothing(fused, *inputs):
    want = fused(*inputs)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = fused(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def distance(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
