"""The gradient of an embedding table: the kernels against float64, frequent words and absent ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altup.core.errors import UserError
from altup.kernels.embedding import embedding, table_gradient_reference
from tests.kernels.interpreter import CHEAP_CHECKS, DEVICE, check_operator, fewer, needs_gpu, runs_kernel

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def test_reference_is_the_gradient_of_pytorch():
    table = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    ids, grad = torch.randint(11, (4, 5)), torch.randn(4, 5, 6, dtype=torch.float64)
    (want,) = torch.autograd.grad(F.embedding(ids, table), table, grad)
    assert torch.allclose(table_gradient_reference(grad.flatten(0, 1), ids.flatten(), 11), want)


def test_refuses_what_no_kernel_takes():
    with pytest.raises(UserError, match="float64"):
        embedding(torch.arange(3), torch.randn(4, 4, dtype=torch.float64), "triton")


def compare(ids, words, d, dtype=torch.float32):
    table = torch.randn(words, d, device=DEVICE).to(dtype).requires_grad_()
    out = embedding(ids, table, "triton")
    assert torch.equal(out, F.embedding(ids, table))
    grad = torch.randn(*ids.shape, d, device=DEVICE).to(dtype)
    (got,) = torch.autograd.grad(out, table, grad)
    want = table_gradient_reference(grad.flatten(0, -2).double(), ids.flatten(), words)
    assert got.dtype == dtype
    assert (got.double() - want).norm() / want.norm() < TOLERANCE[dtype]
    absent = torch.ones(words, dtype=torch.bool, device=DEVICE)
    absent[ids.flatten()] = False
    assert not got[absent].any()


@runs_kernel
@pytest.mark.parametrize("dtype", fewer([torch.bfloat16], list(TOLERANCE)))
@pytest.mark.parametrize("d", [5, 48, 136])
def test_words_of_any_frequency(dtype, d, poisoned):
    """Words 0 to 8 have 0 to 3, 32, 33, 64, 65 and 150 places."""
    counts = torch.tensor([0, 1, 2, 3, 32, 33, 64, 65, 150, 0])
    ids = torch.arange(10).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    compare(ids.view(2, -1).to(DEVICE), 10, d, dtype)


@runs_kernel
def test_one_place_and_one_word(poisoned):
    compare(torch.tensor([[3]], device=DEVICE), 5, 8)
    compare(torch.zeros(40, dtype=torch.long, device=DEVICE), 1, 8)


@runs_kernel
def test_a_word_that_is_none_shows(poisoned):
    table = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    rows = embedding(torch.tensor([4, 5, -1, 0], device=DEVICE), table, "triton")
    assert rows.isnan().any(1).tolist() == [False, True, True, False]


@runs_kernel
@pytest.mark.parametrize("words", [7, 100])
def test_rounded_rows_are_those_rounded_later(words, poisoned):
    """To the last bit, and so is the table's gradient, which stays in float32."""
    table = torch.randn(words, 24, device=DEVICE, requires_grad=True)
    ids, grad = torch.randint(words, (5, 8), device=DEVICE), torch.randn(5, 8, 24, device=DEVICE).bfloat16()
    at_once = embedding(ids, table, "triton", torch.bfloat16)
    later = embedding(ids, table, "triton").bfloat16()
    assert torch.equal(at_once, later)
    (one,), (other,) = (torch.autograd.grad(out, table, grad) for out in (at_once, later))
    assert one.dtype == torch.float32
    assert torch.equal(one, other)


@needs_gpu
@pytest.mark.parametrize("words", [2**15 - 1, 2**15, 70_000])
def test_many_words(words, poisoned):
    compare(torch.randint(words, (3, 500), device=DEVICE), words, 16)
    compare(torch.tensor([0, words - 1, words - 1], device=DEVICE), words, 16)


@runs_kernel
def test_operator_registrations():
    from altup.kernels.embedding.triton import look_up, look_up_backward

    ids, table = torch.tensor([1, 1, 3], device=DEVICE), torch.randn(5, 4, device=DEVICE, requires_grad=True)
    check_operator(look_up, ids, table, torch.bfloat16)
    given = torch.randn(3, 4, device=DEVICE).bfloat16(), ids, 5, torch.float32
    check_operator(look_up_backward, *given, checks=CHEAP_CHECKS)


@needs_gpu
@pytest.mark.parametrize("d", [768, 1536, 2048])
def test_training_sizes(d, poisoned):
    ids = torch.randint(32_128, (64, 512), device=DEVICE)
    ids[:, :30] = 17
    compare(ids, 32_128, d, torch.bfloat16)
    runs = []
    table = torch.randn(32_128, d, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(64, 512, d, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        runs += torch.autograd.grad(embedding(ids, table, "triton"), table, grad)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_rows_stay_in_registers_and_are_read_sixteen_bytes_at_a_time(hopper):
    from altup.kernels.embedding import triton as kernels

    types = {"table": "*bf16", "grad": "*bf16", "in_order": "*i16", "positions": "*i64", "starts": "*i32"}
    constants = {"D": 1536, "BLOCK": 2048, "ROWS": kernels.ROWS, "FEW": kernels.FEW}
    few = hopper.build(
        kernels.few_kernel, {k: v for k, v in (types | constants).items() if k != "in_order"}, num_warps=4
    )
    constants = {"D": 1536, "ROWS": kernels.MANY_ROWS, "COLUMNS": kernels.MANY_COLUMNS, "FEW": kernels.FEW}
    many = hopper.build(kernels.part_kernel, types | {"parts": "*fp32"} | constants, num_warps=4)
    for compiled in (few, many):
        assert not hopper.spills(compiled)
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 4
        assert compiled.asm["ptx"].count("ld.global.b16") == (compiled is many)  # the word
