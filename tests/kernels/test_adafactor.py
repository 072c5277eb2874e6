"""Adafactor's kernels against plain arithmetic.

On a machine without a GPU they run in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import DEVICE, outside_the_interpreter, pass_in_the_interpreter, runs_kernel


def problem(n, rows, columns, dtype):
    torch.manual_seed(0)
    grads = [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(n)]
    weights = [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(n)]
    factors = [torch.rand(n, size, device=DEVICE) + 0.5 for size in (rows, columns)]
    return grads, weights, *factors


@runs_kernel
@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 1, 1), (2, 33, 17), (3, 32, 130), (1, 100, 257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_descent(n, rows, columns, dtype):
    from altup.kernels.adafactor import triton as kernels
    from altup.kernels.multi_tensor import tensor_list as listed

    grads, weights, row, column = problem(n, rows, columns, dtype)
    wide = [torch.stack(tensors).double() for tensors in (grads, weights)]
    G, W = listed(grads), listed(weights)
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
    from altup.kernels.multi_tensor import tensor_list as listed

    grads, weights, row, column = problem(2, 40, 20, torch.float32)
    grads[1].fill_(float("nan"))
    before = [weight.clone() for weight in weights]
    args = listed(weights), listed(grads), row, column, torch.ones(2, device=DEVICE)
    kernels.descend(*args, torch.tensor(True, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@outside_the_interpreter
def test_kernels_in_the_interpreter():
    pass_in_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_takes_the_same_steps_as_on_a_cpu(dtype):
    from altup.training.optimizers import build_optimizer

    def run(device):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[torch.nn.Linear(130, 130) for _ in range(3)], torch.nn.Linear(130, 300))
        module.to(device, dtype)
        optimizer = build_optimizer("adafactor", module, lr=torch.tensor(0.01, device=device))
        for step in range(12):
            for n, parameter in enumerate(module.parameters()):
                g = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + n))
                parameter.grad = g.to(device, dtype)
            optimizer.step(skip=torch.tensor(step == 5, device=device))
        return [p.detach().float().cpu() for p in module.parameters()]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
