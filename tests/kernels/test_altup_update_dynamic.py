"""The update with coefficients a token, without kernels, against the rule written out with loops."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels.altup_update import altup_update
from altup.kernels.altup_update_dynamic import altup_update_dynamic, altup_update_dynamic_reference, mix_blocks


def problem(K, tokens=(2, 3), d=4, dtype=torch.float64):
    sizes = [(K, *tokens, d), (*tokens, d), (*tokens, K, K), (*tokens, K)]
    return [torch.randn(*size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("K", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("update", [altup_update_dynamic, altup_update_dynamic_reference])
def test_is_the_static_rule_of_each_token(K, update):
    x, y, P, g = problem(K)
    for active in range(K):
        new = update(x, y, P, g, active)
        for b in range(2):
            for t in range(3):
                want = altup_update(x[:, b, t], y[b, t], P[b, t], g[b, t], active)
                torch.testing.assert_close(new[:, b, t], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("K", [1, 3])
def test_gradients(K):
    inputs = [t.requires_grad_() for t in problem(K, (2,), 3)]
    assert torch.autograd.gradcheck(lambda *a: altup_update_dynamic(*a, active=K - 1), inputs)


def test_without_p_it_only_corrects():
    x, y, P, g = problem(3)
    predicted = mix_blocks(x, P)
    new = altup_update_dynamic(predicted, y, None, g, 2)
    torch.testing.assert_close(new, altup_update_dynamic_reference(x, y, P, g, 2))
    as_tuple = altup_update_dynamic(predicted.unbind(0), y, None, g, 2)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(torch.stack(as_tuple), new)


def test_bfloat16_is_rounded_once():
    x, y, P, g = (t.float() for t in problem(4, (8, 16), 32))
    x, y = x.bfloat16(), y.bfloat16()
    new = altup_update_dynamic(x, y, P, g, 0)
    exact = altup_update_dynamic_reference(x.double(), y.double(), P.double(), g.double(), 0)
    assert new.dtype == torch.bfloat16
    torch.testing.assert_close(new.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"P": (2, 3, 2, 3)}, "P is"),
        ({"g": (3, 2, 2)}, "g is"),
        ({"y": (2, 3, 5)}, r"y \[2, 3, 5\]"),
        ({"y": (2, 4, 4)}, "do not fit"),
        ({"active": 2}, "active=2"),
        ({"implementation": "fast"}, "implementation='fast'"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, y, P, g = problem(2)
    given = {"y": y, "P": P, "g": g, "active": 1}
    given |= {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in change.items()}
    with pytest.raises(UserError, match=message):
        altup_update_dynamic(x, **given)


def test_blocks_unlike_one_another_are_refused():
    x, y, P, g = problem(2)
    with pytest.raises(UserError, match="float32"):
        altup_update_dynamic([x[0], x[1].float()], y, P, g, 0)


def test_kernels_asked_for_where_they_cannot_run_are_refused():
    x, y, P, g = problem(2, dtype=torch.float32)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        altup_update_dynamic(x, y, P, g, 0, "triton")
    with pytest.raises(UserError, match="float64"):
        altup_update_dynamic(x.double(), y, P, g, 0, "triton")
