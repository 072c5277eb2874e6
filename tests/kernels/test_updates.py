"""Algorithms 1 and 2 against oracles that follow the paper's pseudocode, number by number."""

from __future__ import annotations

import pytest
import torch

from altup.kernels import (
    altup_update,
    altup_update_reference,
    sequence_update,
    sequence_update_reference,
)


def algorithm_1(x_old, computed, p, g, j_star):
    """The paper's Algorithm 1 after its second line, with Python loops over vectors."""
    K = len(x_old)
    x_hat = []
    for i in range(K):
        total = torch.zeros_like(x_old[0])
        for j in range(K):
            total = total + p[i][j] * x_old[j]
        x_hat.append(total)
    return [x_hat[i] + g[i] * (computed - x_hat[j_star]) for i in range(K)]


def algorithm_2(x, layer, a1, a2, b, k):
    """The paper's Algorithm 2 on a list of vectors; `layer` maps the list of kept vectors to as many."""
    T = len(x)
    y_hat = [a1 * x[i] + a2 * x[(i // k) * k] for i in range(T)]
    kept = list(range(0, T, k))
    y_tilde = dict(zip(kept, layer([x[i] for i in kept]), strict=True))
    return [y_hat[i] + b * (y_tilde[(i // k) * k] - y_hat[(i // k) * k]) for i in range(T)]


def random_update(K, shape=(2, 5, 6), dtype=torch.float64, requires_grad=False):
    x = torch.randn(K, *shape, dtype=dtype)
    y = torch.randn(*shape, dtype=dtype)
    P = torch.randn(K, K, dtype=torch.promote_types(dtype, torch.float32))
    g = torch.randn(K, dtype=P.dtype)
    return [t.requires_grad_(requires_grad) for t in (x, y, P, g)]


@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("update", [altup_update, altup_update_reference])
def test_update_is_algorithm_1(K, update):
    x, y, P, g = random_update(K)
    for active in range(K):
        new = update(x, y, P, g, active)
        for b in range(x.shape[1]):
            for t in range(x.shape[2]):
                want = algorithm_1([x[i, b, t] for i in range(K)], y[b, t], P.tolist(), g.tolist(), active)
                for i in range(K):
                    torch.testing.assert_close(new[i, b, t], want[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("K", [1, 2, 3, 5])
def test_update_gradients(K):
    inputs = random_update(K, shape=(1, 2, 3), requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: altup_update(*a, active=K - 1), inputs)


@pytest.mark.parametrize("K", [2, 4])
def test_compiled_form_equals_reference_with_gradients(K):
    """Under torch.compile another expression is used; it must be the same function."""
    inputs = random_update(K, requires_grad=True)
    compiled = torch.compile(altup_update, backend="aot_eager", fullgraph=True)
    grad = torch.randn(K, 2, 5, 6, dtype=torch.float64)
    got = torch.autograd.grad((compiled(*inputs, 1) * grad).sum(), inputs)
    want = torch.autograd.grad((altup_update_reference(*inputs, 1) * grad).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_bfloat16_state_is_rounded_once():
    """Sums run in float32: the result is the exact one, rounded to bfloat16 once."""
    x, y, P, g = random_update(3, shape=(4, 16, 32), dtype=torch.bfloat16)
    new = altup_update(x, y, P, g, 0)
    exact = altup_update_reference(x.double(), y.double(), P.double(), g.double(), 0)
    assert new.dtype == torch.bfloat16
    torch.testing.assert_close(new.double(), exact, rtol=2**-8, atol=1e-6)


def test_autocast_does_not_round_the_coefficients():
    x, y, P, g = random_update(2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        new = altup_update(x, y, P, g, 1)
    torch.testing.assert_close(new, altup_update_reference(x, y, P, g, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("T", "stride"), [(1, 4), (8, 4), (9, 4), (11, 4), (7, 3), (5, 1), (3, 8)])
@pytest.mark.parametrize("update", [sequence_update, sequence_update_reference])
def test_sequence_update_is_algorithm_2(T, stride, update):
    x = torch.randn(2, T, 3, dtype=torch.float64)
    a, b = torch.randn(2, dtype=torch.float64), torch.randn(1, dtype=torch.float64)
    computed = torch.tanh(x[:, ::stride] * 1.5)
    got = update(x, computed, a, b, stride)
    for row in range(2):
        want = algorithm_2(
            list(x[row]), lambda kept: [torch.tanh(v * 1.5) for v in kept], a[0], a[1], b[0], stride
        )
        torch.testing.assert_close(got[row], torch.stack(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("T", "stride"), [(5, 2), (4, 4), (6, 4)])
def test_sequence_update_gradients(T, stride):
    inputs = [
        torch.randn(1, T, 2, dtype=torch.float64),
        torch.randn(1, -(-T // stride), 2, dtype=torch.float64),
        torch.randn(2, dtype=torch.float64),
        torch.randn(1, dtype=torch.float64),
    ]
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(lambda *args: sequence_update(*args, stride=stride), inputs)
