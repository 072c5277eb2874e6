"""Weights of many layers rounded to 8 bits by two launches, which find them by their addresses.

Layer by layer a launch takes longer than its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.fp8 import reference
from altup.kernels.fp8.triton import CAST, largest_of, power_of_two, rounds_first, store_both, tile_of
from altup.kernels.multi_tensor import TensorList, pointer, tensor_list


def round_many(
    q: Tensor, transposed: Tensor, scales: Tensor, weights: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Weights [m, n], all alike; len(weights) / len(scales) that follow one another are a group of one scale.

    q [groups, m·each, n] ← the group's weights, one below the other, divided by the scale and rounded, transposed
    [groups, n, m·each] ← its transpose. m is a multiple of 4. All are first rounded to `dtype`.
    """
    table = tensor_list(weights)
    each = len(weights) // len(scales)
    half = rounds_first(weights, dtype)
    largest = _largest_of_each(table, len(weights), each, half)
    rows, columns, warps = CAST
    m, n = weights[0].shape
    cast_many_kernel[(triton.cdiv(n, columns), triton.cdiv(m, rows), len(weights))](
        table.addresses, table.like, q, transposed.view(torch.int32), scales, scales.stride(0), largest, each,
        largest.shape[1], m, n, MOST=torch.finfo(q.dtype).max, HALF=half,
        NUMBERS=triton.next_power_of_2(each * largest.shape[1]),
        ROWS=rows, COLUMNS=columns, EVEN=m % rows == 0 and n % columns == 0, num_warps=warps,
    )  # fmt: skip


def _largest_of_each(table: TensorList, tensors: int, each: int, half: bool) -> Tensor:
    """The largest numbers of parts of the tensors, [tensors, parts]."""
    numel = table.like.numel()
    out = table.like.new_empty(tensors, reference.parts_of(numel, each), dtype=torch.float32)
    rounds = triton.cdiv(numel, out.shape[1] * reference.CHUNK)
    largest_many_kernel[(out.shape[1], tensors)](
        out, table.addresses, table.like, numel, rounds, HALF=half, CHUNK=reference.CHUNK, num_warps=8
    )
    return out


@triton.jit
def largest_many_kernel(out, addresses, like, numel, rounds, HALF: tl.constexpr, CHUNK: tl.constexpr):
    most = largest_of(pointer(addresses, like, tl.program_id(1)), numel, rounds, HALF, CHUNK)
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), most)


@triton.jit
def cast_many_kernel(
    addresses, like, q, words, scales, apart, largest, each, parts, m, n,
    MOST: tl.constexpr, NUMBERS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """words: the transposes, four rows of q in each."""
    tensor = tl.program_id(2)
    group = tensor // each
    x = pointer(addresses, like, tensor)
    word = tl.program_id(1).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (4 * word < m)[:, None] & (column < n)[None, :]
    a, b, c, d = tile_of(x, word, column, n, inside, HALF, EVEN)
    i = tl.arange(0, NUMBERS)
    sizes = tl.load(largest + group * each * parts + i, mask=i < each * parts, other=0.0)
    own = power_of_two(tl.max(sizes.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True), MOST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tensor == group * each):
        tl.store(scales + group * apart, own)
    by = tl.div_rn(1.0, own)
    stride = each * (m // 4)
    q += tensor.to(tl.int64) * m * n
    words += group.to(tl.int64) * n * stride + (tensor - group * each) * (m // 4)
    store_both(q, words, a * by, b * by, c * by, d * by, word, column, n, stride, inside, EVEN)
