"""Adapters, hooks and patches on projections and norms whose weights we otherwise take from under them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altup.nn import LayerNorm, RMSNorm
from altup.nn.linear import is_bare
from tests.models.helpers import batch, tiny, tiny_t5


class Adapted(nn.Module):
    """As LoRA libraries do it: the original's weight and bias show through, and are not all."""

    def __init__(self, original):
        super().__init__()
        self.original = original
        self.change = nn.Linear(original.in_features, original.out_features)
        nn.init.normal_(self.change.weight)

    weight = property(lambda self: self.original.weight)
    bias = property(lambda self: self.original.bias)

    def forward(self, x):
        return self.original(x) + self.change(x)


def with_bias(linear):
    new = nn.Linear(linear.in_features, linear.out_features)
    new.weight = linear.weight
    nn.init.normal_(new.bias)
    return new


def hooked(linear):
    linear.register_forward_hook(lambda module, given, output: 2 * output)
    return linear


def patched(linear):
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)
    return linear


CHANGES = [Adapted, with_bias, hooked, patched]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["t5", "bert", "decoder"])
def test_the_loss_without_logits_is_that_with_them(family, change):
    model = tiny_t5("altup") if family == "t5" else tiny(family, "altup")
    data = batch(family)
    unchanged = model(**data).loss
    model.set_output_embeddings(change(model.get_output_embeddings()))
    want = model(**data).loss
    assert not torch.allclose(want, unchanged, rtol=1e-3)
    torch.testing.assert_close(model(**data, return_logits=False).loss, want)


@pytest.mark.parametrize("change", CHANGES)
def test_training_reads_the_memory_as_evaluation_does(change):
    model, data = tiny_t5("altup"), batch()
    unchanged = model(**data).loss
    for layer in model.decoder.layers:
        layer.cross_attention.v = change(layer.cross_attention.v)
    want = model(**data).loss
    assert not torch.allclose(want, unchanged, rtol=1e-3)
    torch.testing.assert_close(model.train()(**data).loss, want)


@pytest.mark.parametrize("family", ["t5", "bert", "decoder"])
def test_norms_may_be_wrapped(family):
    """As PEFT's LN tuning does: whoever takes its place has a forward, and nothing else of a norm."""
    model = tiny_t5("altup") if family == "t5" else tiny(family, "altup")
    data = batch(family)
    want = model(**data).loss
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, RMSNorm | LayerNorm):
                setattr(module, name, nn.Sequential(part))
    assert torch.equal(model(**data).loss, want)


def test_plain_projections_are_bare():
    assert is_bare(nn.Linear(2, 3, bias=False))
    assert is_bare(nn.Linear(2, 3), bias=True)
