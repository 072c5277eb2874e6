from __future__ import annotations

import math

import pytest
import torch

from altup.nn.attention import GroupedAttention


def by_hand(module, x, seen):
    """Head by head, query by query, in plain arithmetic."""
    heads = module.q.out_features // module.d_kv
    q, k, v = (linear(x).unflatten(-1, (-1, module.d_kv)) for linear in (module.q, module.k, module.v))
    out = torch.zeros_like(q)
    for head in range(heads):
        shared = head // module.group
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, shared]) / math.sqrt(module.d_kv)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[:, :, head] = weights @ v[:, :, shared]
    return module.o(out.flatten(2))


@pytest.mark.parametrize("shared", [6, 3, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ["all", "causal", "masked"])
def test_against_plain_arithmetic(shared, bias, how):
    module = GroupedAttention(24, 6, 8, shared, bias=bias).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    ones = torch.ones(7, 7)
    seen = {"all": ones, "causal": ones.tril(), "masked": ones.tril(2)}[how].bool()
    mask = torch.zeros(7, 7).masked_fill(~seen, torch.finfo(torch.float32).min) if how == "masked" else None
    got, want = module(x, mask, causal=how == "causal"), by_hand(module, x, seen)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(out.square().sum(), [x, *module.parameters()]) for out in (got, want)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


def test_dropout_in_training_only():
    module, x = GroupedAttention(24, 6, 8, 2, dropout=0.5), torch.randn(2, 7, 24)
    assert not torch.equal(module(x, causal=True), module(x, causal=True))
    module.eval()
    assert torch.equal(module(x, causal=True), module(x, causal=True))
