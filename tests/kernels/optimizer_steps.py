"""What tests of optimizers with kernels share: weights and gradients of many sizes, and some questions."""

from __future__ import annotations

import torch
from torch import nn

from tests.kernels.interpreter import DEVICE

SIZES = (1.0, 1e-5, 30.0)  # of weights; the second is below the smallest that counts


def parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) * SIZES[n % 3] for n, shape in enumerate(shapes)]
    return [nn.Parameter(weight.to(DEVICE, dtype)) for weight in made]


def set_gradients(weights, step):
    generator = torch.Generator().manual_seed(step + 1)
    for n, p in enumerate(weights):
        p.grad = (torch.randn(p.shape, generator=generator) * 10.0 ** ((step + n) % 4 - 2)).to(p)


def everything(weights, optimizer):
    """Copies of all that a step may change."""
    return [t.detach().clone() for p in weights for t in (p, *optimizer.state[p].values())]


def skipped_steps_change_no_bit(weights, optimizer):
    for step in range(2):  # before the first step that counts, too
        before = everything(weights, optimizer)
        for p in weights:
            p.grad = torch.full_like(p, float("nan"))
        optimizer.step(skip=torch.tensor(True, device=DEVICE))
        assert all(torch.equal(a, b) for a, b in zip(before, everything(weights, optimizer), strict=True))
        set_gradients(weights, step)
        optimizer.step(skip=torch.tensor(False, device=DEVICE))
        assert all(optimizer.state[p]["step"] == step + 1 for p in weights)
        assert all(p.isfinite().all() for p in weights)


def replayed_steps_are_the_launched_ones(shapes, build):
    """Bit for bit, with another rate in each and one that is skipped; and nothing waits for the device."""
    from altup.kernels.cuda_graph import record, warm_up

    def train(replays):
        weights, lr = parameters(shapes), torch.tensor(0.0, device=DEVICE)
        optimizer, skip = build(weights, lr=lr), torch.tensor(True, device=DEVICE)
        set_gradients(weights, 0)
        warm_up(lambda: optimizer.step(skip=skip), lr.device)
        step = record(lambda: optimizer.step(skip=skip)) if replays else lambda: optimizer.step(skip=skip)
        gradients = [p.grad for p in weights]
        for n in range(6):
            set_gradients(weights, n)
            for p, kept in zip(weights, gradients, strict=True):
                p.grad = kept.copy_(p.grad)
            lr.fill_(0.01 * (n + 1))
            skip.fill_(n == 3)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return everything(weights, optimizer)

    for got, want in zip(train(True), train(False), strict=True):
        assert torch.equal(got, want)
