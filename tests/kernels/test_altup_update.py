"""What the public function promises on any machine: kinds of state, the residual, what is refused."""

from __future__ import annotations

import pytest
import torch

from altup.core.errors import UserError
from altup.kernels import altup_update, altup_update_reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def problem(K, dtype=torch.float64, shape=(2, 5, 6)):
    x, y, residual = (torch.randn(*s, dtype=dtype) for s in [(K, *shape), shape, shape])
    wide = torch.promote_types(dtype, torch.float32)
    return x, y, residual, torch.randn(K, K, dtype=wide), torch.randn(K, dtype=wide)


@pytest.mark.parametrize("K", [1, 2, 4, 9])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_go_in_and_come_out_as_a_tuple(K, kind, dtype):
    x, y, _, P, g = problem(K, dtype)
    new = altup_update(kind(x.unbind(0)), y, P, g, K - 1)
    assert isinstance(new, tuple)
    torch.testing.assert_close(torch.stack(new), altup_update(x, y, P, g, K - 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_without_rounding(dtype):
    """Against float64: residual + y is held in float32 at least, whatever the state's dtype."""
    x, y, residual, P, g = problem(3, dtype)
    residual = residual * 100
    new = altup_update(x, y, P, g, 1, residual)
    exact = altup_update_reference(x.double(), y.double() + residual.double(), P.double(), g.double(), 1)
    assert new.dtype == dtype
    torch.testing.assert_close(new, exact.to(dtype), rtol=1e-5, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_blocks_and_residual(compiled):
    x, y, residual, P, g = problem(3, shape=(2, 3))

    def run(y, residual, P, g, *blocks):
        return altup_update(blocks, y, P, g, 2, residual)

    inputs = [t.requires_grad_() for t in (y, residual, P, g, *(b.clone() for b in x))]
    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.autograd.gradcheck(run, inputs)


def test_residual_of_another_dtype():
    x, y, residual, P, g = problem(2, torch.float32)
    got = altup_update(x, y.bfloat16(), P, g, 0, residual)
    torch.testing.assert_close(got, altup_update_reference(x, y.bfloat16() + residual, P, g, 0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": torch.zeros(2, 5, 7)}, r"\[2, 2, 5, 6\]"),
        ({"x": [torch.zeros(2, 5, 6), torch.zeros(2, 5, 7)]}, r"\[2, 5, 7\]"),
        ({"x": [torch.zeros(2, 5, 6), torch.zeros(2, 5, 6).half()]}, "float16"),
        ({"P": torch.zeros(3, 3)}, r"P \[3, 3\]"),
        ({"g": torch.zeros(3)}, r"g \[3\]"),
        ({"active": 2}, "active=2"),
        ({"active": -1}, "active=-1"),
        ({"residual": torch.zeros(6)}, r"residual \[6\]"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"implementation": "triton", "x": torch.zeros(2, 2, 5, 6).double()}, "float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    x, y, _, P, g = problem(2, torch.float32)
    arguments = {"x": x, "y": y, "P": P, "g": g, "active": 0} | change
    with pytest.raises(UserError, match=says):
        altup_update(**arguments)


def test_triton_is_refused_where_it_cannot_run():
    x, y, _, P, g = problem(2, torch.float32)
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        altup_update(x, y, P, g, 0, implementation="triton")
