"""Matrices below one another, and the gradients of each."""

from __future__ import annotations

import pytest
import torch
from torch import library

from altup.kernels.join_rows import join_rows
from tests.kernels.interpreter import DEVICE, runs_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_concatenation_with_its_gradients(dtype):
    parts = [torch.randn(rows, 4, requires_grad=True) for rows in (3, 1, 2)]
    whole = join_rows(parts, dtype)
    assert torch.equal(whole, torch.cat(parts).to(dtype))
    upstream = torch.randn(6, 4).to(dtype)
    gradients = torch.autograd.grad(whole, parts, upstream)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    assert torch.equal(torch.cat(gradients), upstream.float())
    library.opcheck(join_rows, (parts, dtype))


@runs_kernel
@pytest.mark.parametrize("shape", [(3, 8), (40, 64)])
def test_a_kernel_joins_parts_alike(shape, poisoned):
    parts = [torch.randn(shape, device=DEVICE) for _ in range(3)]
    assert torch.equal(join_rows(parts, torch.bfloat16), torch.cat(parts).bfloat16())


def test_compiled_code_joins_once():
    """And keeps the result for the backward pass."""
    graphs = []

    def count(graph, inputs):
        graphs.append(sum(node.target is torch.ops.altup.join_rows.default for node in graph.graph.nodes))
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    weights = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    x = torch.randn(5, 4, requires_grad=True)
    run = torch.compile(lambda x: (x @ join_rows(weights, torch.float32).t()).sin().sum(), backend=backend)
    run(x).backward()
    assert graphs == [1, 0]
