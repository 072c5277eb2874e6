"""Adafactor: the definition by hand, and the kernels and the optimizer's plain path against it in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from altup.core.errors import UserError
from altup.kernels import adafactor_reference, adafactor_update
from altup.kernels.adafactor import runs_fused
from tests.kernels.interpreter import DEVICE, runs_kernel
from tests.training.tiny import optimizer_of


def test_the_definition_by_hand():
    """A 2 × 2 matrix, two steps, from the formulas."""
    w, r, c = [[2.0, -1.0], [0.5, 3.0]], [0.0, 0.0], [0.0, 0.0]
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in (w, r, c)]
    for t, g in enumerate(([[0.5, -3.0], [0.1, 1.0]], [[-0.1, 2.0], [4.0, 0.3]]), start=1):
        grad = torch.tensor(g, dtype=torch.float64)
        tensors = list(adafactor_reference(tensors[0], grad, *tensors[1:], t, lr=0.1, smallest=1e-3))
        beta = 1 - t**-0.8
        for i in range(2):
            r[i] = beta * r[i] + (1 - beta) * ((g[i][0] ** 2 + g[i][1] ** 2) / 2 + 1e-30)
            c[i] = beta * c[i] + (1 - beta) * ((g[0][i] ** 2 + g[1][i] ** 2) / 2 + 1e-30)
        u = [[g[i][j] * math.sqrt((r[0] + r[1]) / 2 / (r[i] * c[j])) for j in range(2)] for i in range(2)]
        shrink = max(1.0, math.sqrt(sum(x * x for row in u for x in row) / 4))
        size = math.sqrt(sum(x * x for row in w for x in row) / 4)
        w = [[w[i][j] - 0.1 * size * u[i][j] / shrink for j in range(2)] for i in range(2)]
    for got, want in zip(tensors, (w, r, c), strict=True):
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=0)


def matrices(n, rows, columns, dtype, device):
    """Weights, of which one is tiny, and fresh moments and step counts."""
    weights = [torch.randn(rows, columns, device=device).to(dtype) * 10.0 ** (-5 * i) for i in range(n)]
    wide = torch.promote_types(dtype, torch.float32)
    moments = ([torch.zeros(size, dtype=wide, device=device) for _ in weights] for size in (rows, columns))
    return weights, *moments, [torch.zeros((), device=device) for _ in weights]


def test_the_plain_optimizer_takes_the_steps_of_the_definition():
    """Both sides of 128 or more: factored; a skipped step changes nothing."""
    weights, rows, columns, steps = matrices(2, 129, 128, torch.float64, "cpu")
    module = nn.ParameterList([nn.Parameter(w.clone()) for w in weights])
    optimizer = optimizer_of("adafactor", module, lr=0.01)
    for step in range(4):
        grads, skip = [torch.randn_like(w) for w in weights], torch.tensor(step == 2)
        adafactor_update(weights, grads, rows, columns, steps, lr=0.01, skip=skip, smallest=1e-3)
        for p, grad in zip(module, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step(skip=skip)
        for p, w in zip(module, weights, strict=True):
            torch.testing.assert_close(p.detach(), w, rtol=1e-6, atol=1e-12)
    assert [int(step) for step in steps] == [3, 3]


def test_kernels_asked_for_where_they_cannot_run_are_refused():
    weights, *state = matrices(1, 3, 4, torch.float64, "cpu")
    with pytest.raises(UserError, match="need a CUDA GPU"):
        adafactor_update(weights, weights, *state, lr=0.1, smallest=1e-3, implementation="triton")


@runs_kernel
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 17), (40, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_definition(rows, columns, dtype, poisoned):
    """Each from the same weights, because of what bfloat16 rounds away."""
    weights, *state = matrices(2, rows, columns, dtype, DEVICE)
    exact_state = [[tensor.double() for tensor in tensors] for tensors in state]
    for step in range(3):
        exact = [w.double() for w in weights]
        grads, skip = [torch.randn_like(w) for w in weights], torch.tensor(step == 1, device=DEVICE)
        assert runs_fused(weights, grads)
        options = {"lr": torch.tensor(0.02, device=DEVICE), "skip": skip, "smallest": 1e-3}
        adafactor_update(weights, grads, *state, implementation="triton", **options)
        adafactor_update(exact, [g.double() for g in grads], *exact_state, implementation="plain", **options)
        for got, want in zip([weights, *state], [exact, *exact_state], strict=True):
            for a, b in zip(got, want, strict=True):
                lost = 2 * max(torch.finfo(a.dtype).eps, 1e-6) * b.abs().max()
                assert (a.double() - b).abs().max() <= lost


@runs_kernel
def test_what_the_kernels_cannot_read():
    w = torch.randn(8, 9, device=DEVICE)
    assert runs_fused([w], [w])
    assert not runs_fused([w.t()], [w.t()])
    assert not runs_fused([w, w.bfloat16()], [w, w])
    assert not runs_fused([w.double()], [w.double()])
    assert not runs_fused([w, w[:4].contiguous()], [w, w[:4].contiguous()])


def problem(n, rows, columns, dtype):
    torch.manual_seed(0)
    grads = [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(n)]
    weights = [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(n)]
    factors = [torch.rand(n, size, device=DEVICE) + 0.5 for size in (rows, columns)]
    return grads, weights, *factors


@runs_kernel
@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 1, 1), (2, 33, 17), (3, 32, 130), (1, 70, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_descent(n, rows, columns, dtype, poisoned):
    from altup.kernels.adafactor import triton as kernels
    from altup.kernels.multi_tensor import tensor_list

    grads, weights, row, column = problem(n, rows, columns, dtype)
    wide = [torch.stack(tensors).double() for tensors in (grads, weights)]
    G, W = tensor_list(grads), tensor_list(weights)
    by_row, by_column, of_weights = kernels.squares(G, W)
    torch.testing.assert_close(by_row.double(), wide[0].square().sum(2), rtol=1e-5, atol=0)
    torch.testing.assert_close(by_column.double(), wide[0].square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(of_weights.double(), wide[1].square().sum((1, 2)), rtol=1e-5, atol=0)

    U = wide[0] * row.double()[:, :, None] * column.double()[:, None, :]
    sizes = kernels.update_squares(G, row, column)
    torch.testing.assert_close(sizes.double(), U.square().sum((1, 2)), rtol=1e-5, atol=0)

    scale = torch.rand(n, device=DEVICE)
    before = [weight.clone() for weight in weights]
    kernels.descend(W, G, row, column, scale, torch.tensor(True, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    kernels.descend(W, G, row, column, scale, torch.tensor(False, device=DEVICE))
    want = (wide[1] - scale.double()[:, None, None] * U).to(dtype)
    torch.testing.assert_close(
        torch.stack(weights), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


@runs_kernel
def test_a_skipped_step_reads_no_bad_number_into_the_weights():
    from altup.kernels.adafactor import triton as kernels
    from altup.kernels.multi_tensor import tensor_list

    grads, weights, row, column = problem(2, 40, 20, torch.float32)
    grads[1].fill_(float("nan"))
    before = [weight.clone() for weight in weights]
    args = tensor_list(weights), tensor_list(grads), row, column, torch.ones(2, device=DEVICE)
    kernels.descend(*args, torch.tensor(True, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_takes_the_same_steps_as_on_a_cpu(dtype):
    def run(device):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[torch.nn.Linear(130, 130) for _ in range(3)], torch.nn.Linear(130, 300))
        module.to(device, dtype)
        optimizer = optimizer_of("adafactor", module, lr=torch.tensor(0.01, device=device))
        for step in range(12):
            for n, parameter in enumerate(module.parameters()):
                g = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + n))
                parameter.grad = g.to(device, dtype)
            optimizer.step(skip=torch.tensor(step == 5, device=device))
        return [p.detach().float().cpu() for p in module.parameters()]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
