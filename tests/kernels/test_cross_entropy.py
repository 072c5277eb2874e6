from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from altup.core.errors import UserError
from altup.kernels import token_sums


def test_sums_against_torch_and_by_hand():
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    labels = torch.randint(0, 11, (3, 7))
    labels[0, 4:] = -100
    sums = token_sums(logits, labels, z_loss=0.1)
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    z = correct = tokens = 0
    for row, label in zip(logits.flatten(0, 1), labels.flatten(), strict=True):
        if label == -100:
            continue
        z += math.log(sum(math.exp(v) for v in row.tolist())) ** 2
        correct += int(row.argmax()) == int(label)
        tokens += 1
    torch.testing.assert_close(sums.nll, nll)
    torch.testing.assert_close(sums.loss, nll + 0.1 * z)
    assert (sums.correct.item(), sums.tokens.item()) == (correct, tokens)


def test_no_label_counts():
    sums = token_sums(torch.randn(2, 3, 5), torch.full((2, 3), -100), z_loss=1e-4)
    assert [s.item() for s in sums] == [0, 0, 0, 0]


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_is_no_token_is_an_error(label):
    """Not the loss of another token."""
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        token_sums(torch.randn(2, 5), torch.tensor([0, label]))


def test_labels_of_another_shape_are_refused():
    """One label would otherwise be spread over all tokens of its row."""
    for labels in (torch.zeros(2, 1).long(), torch.zeros(2, 5).long(), torch.zeros(1, 3).long()):
        with pytest.raises(UserError, match="do not fit"):
            token_sums(torch.randn(2, 3, 5), labels)


def test_huge_half_precision_logits_stay_finite():
    logits = torch.tensor([[6e4, -6e4, 0.0]], dtype=torch.float16, requires_grad=True)
    loss = token_sums(logits, torch.tensor([2]), z_loss=0.0).loss
    loss.backward()
    assert loss.item() == 60000
    assert torch.isfinite(logits.grad).all()
