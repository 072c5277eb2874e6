"""What the kernels of Gemma 3n's AltUp share. A program takes one token and walks through its d columns.

The tile of columns is two-dimensional: a row is one thread's vector, so that a sum over rows stays within threads
until the very end. Arithmetic is float32. What a token's backward pass leaves for the weights, a few numbers each,
is summed over the tokens by ordinary matrix products, and only for weights that want it.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import Config, ceil_div, multiprocessors, vector_width, without_autocast

COLUMNS = Config(
    warps=1, vectors=1, programs_per_sm=8
)  # of kernels that add up columns over tokens; not timed yet
FEW, MOST_WARPS = 128, 16  # tokens that leave multiprocessors idle, and the warps that each gets then


@triton.jit
def tile(BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of a tile, counted from its first."""
    return tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load(pointer, start, lanes, mask):
    return tl.load(pointer + start + lanes, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, start, lanes, value, mask):
    tl.store(pointer + start + lanes, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_blocks(pointers, start, lanes, mask, COUNT: tl.constexpr):
    blocks = ()
    for i in tl.static_range(COUNT):
        blocks = blocks + (load(pointers[i], start, lanes, mask),)
    return blocks


@triton.jit
def load_sum(pointers, start, lanes, mask, COUNT: tl.constexpr):
    """Of all blocks but the first."""
    total = load(pointers[1], start, lanes, mask)
    for i in tl.static_range(2, COUNT):
        total += load(pointers[i], start, lanes, mask)
    return total


@triton.jit
def load_numbers(pointer, start, COUNT: tl.constexpr):
    numbers = ()
    for k in tl.static_range(COUNT):
        numbers = numbers + (tl.load(pointer + start + k).to(tl.float32),)
    return numbers


@triton.jit
def store_numbers(pointer, start, numbers, COUNT: tl.constexpr):
    for k in tl.static_range(COUNT):
        tl.store(pointer + start + k, numbers[k])


@triton.jit
def zeros(COUNT: tl.constexpr, SIZE: tl.constexpr):
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([SIZE], tl.float32),)
    return vectors


@triton.jit
def tanh_of(numbers, COUNT: tl.constexpr):
    result = ()
    for k in tl.static_range(COUNT):
        e = tl.exp(-2.0 * tl.abs(numbers[k]))
        t = (1.0 - e) / (1.0 + e)
        result = result + (tl.where(numbers[k] < 0, -t, t),)
    return result


@triton.jit
def times(matrix, vector, ROWS: tl.constexpr, K: tl.constexpr):
    """matrix·vector for a matrix [ROWS, K] in memory: ROWS numbers."""
    result = ()
    for n in tl.static_range(ROWS):
        total = tl.load(matrix + n * K).to(tl.float32) * vector[0]
        for k in tl.static_range(1, K):
            total += tl.load(matrix + n * K + k).to(tl.float32) * vector[k]
        result = result + (total,)
    return result


@triton.jit
def transposed_times(matrix, vector, ROWS: tl.constexpr, K: tl.constexpr):
    """matrixᵀ·vector for a matrix [ROWS, K] in memory: K numbers."""
    result = ()
    for k in tl.static_range(K):
        total = tl.load(matrix + k).to(tl.float32) * vector[0]
        for n in tl.static_range(1, ROWS):
            total += tl.load(matrix + n * K + k).to(tl.float32) * vector[n]
        result = result + (total,)
    return result


@triton.jit
def route(x, token, d, weight, norm, eps, K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """K numbers, weight·(norm ∘ x) / (rms(x)·d) before the tanh, and after them 1 / rms(x)."""
    lanes = tile(BLOCK, WIDTH)
    squares = tl.zeros([BLOCK // WIDTH], tl.float32)
    sums = zeros(K, BLOCK // WIDTH)
    for column in range(0, d, BLOCK):
        mask = lanes < d - column
        value = load(x, token * d + column, lanes, mask)
        squares += tl.sum(value * value, axis=1)
        scaled = value * load(norm, column, lanes, mask)
        new = ()
        for k in tl.static_range(K):
            new = new + (sums[k] + tl.sum(scaled * load(weight, k * d + column, lanes, mask), axis=1),)
        sums = new
    inverse = 1.0 / tl.sqrt(tl.sum(squares) / d + eps)
    routed = ()
    for k in tl.static_range(K):
        routed = routed + (tl.sum(sums[k]) * (inverse / d),)
    return routed + (inverse,)


@triton.jit
def slope_of_tanh(d_m, m, COUNT: tl.constexpr):
    """The gradient of what the tanh was given."""
    result = ()
    for k in tl.static_range(COUNT):
        result = result + (d_m[k] * (1.0 - m[k] * m[k]),)
    return result


@triton.jit
def dot(a, b, COUNT: tl.constexpr):
    total = a[0] * b[0]
    for k in tl.static_range(1, COUNT):
        total += a[k] * b[k]
    return total


@triton.jit
def route_backward(value, d_routed, along, inverse, d, weight, norm, column, lanes, mask, K: tl.constexpr):
    """The gradient of columns `value` of x, given that of the K numbers; `along` is Σ d_routed·routed.

    ∂routedₖ/∂x = weightₖ ∘ norm / (rms·d) − routedₖ·x / (rms²·d).
    """
    total = d_routed[0] * load(weight, column, lanes, mask)
    for k in tl.static_range(1, K):
        total += d_routed[k] * load(weight, k * d + column, lanes, mask)
    return (inverse / d) * (total * load(norm, column, lanes, mask) - (along * inverse) * value)


def tiles(config: Config, x: Tensor, *others: Tensor | None) -> dict[str, int]:
    """The tile of a program, for a launch. Where there are fewer tokens than multiprocessors, as in decoding,
    nothing but more warps makes a token faster."""
    width, d = vector_width(x, *others), x.shape[-1]
    warps = config.warps
    if x.numel() <= FEW * d:
        while warps < MOST_WARPS and 2 * warps * config.vectors * 32 * width <= d:
            warps *= 2
    return {"BLOCK": width * 32 * warps * config.vectors, "WIDTH": width, "num_warps": warps}


def sum_columns(kernel: Any, out: Tensor, x: Tensor, given: Sequence[Any], **constants: int) -> None:
    """Fill `out` [d], float32, by a kernel whose programs add up columns over some of x's tokens each."""
    d, block = x.shape[-1], vector_width(x) * 32 * COLUMNS.warps * COLUMNS.vectors
    tokens, across = x.numel() // d, ceil_div(d, block)
    if not tokens:
        out.zero_()
        return
    rows = ceil_div(tokens * across, multiprocessors(x.device) * COLUMNS.programs_per_sm)
    sums = out.new_empty(ceil_div(tokens, rows), d)
    kernel[(across, len(sums))](sums, *given, tokens, rows, d, **constants, BLOCK=block, num_warps=COLUMNS.warps)
    torch.sum(sums, dim=0, out=out)


def router_numbers(block: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Memory for the router's numbers and 1 / rms."""
    tokens = block.shape[:-1]
    return block.new_empty(*tokens, K, dtype=torch.float32), block.new_empty(tokens, dtype=torch.float32)


def blocks_of(state: Sequence[Tensor]) -> Sequence[Tensor]:
    """The K ≥ 2 blocks of a list of blocks, or of a list of one stacked tensor."""
    return state[0].unbind(0) if len(state) == 1 else state


def router_gradients(
    x: Tensor, d_routed: Tensor, inverses: Tensor, weight: Tensor, norm: Tensor, needs: set[str]
) -> dict[str, Tensor]:
    """Those of the router and of its norm's scale, from Z = Σ over tokens of (∂routed / rms) ⊗ x: [K, d]."""
    if not needs & {"weight", "norm"}:  # as under LoRA
        return {}
    Z = outer_sum(d_routed * (inverses / x.shape[-1]).unsqueeze(-1), x)
    gradients = {"weight": Z * norm.float(), "norm": (Z * weight.float()).sum(dim=0)}
    return {name: value.to(weight.dtype if name == "weight" else norm.dtype) for name, value in gradients.items()}


def outer_sum(a: Tensor, b: Tensor) -> Tensor:
    """Σ over tokens of a ⊗ b: [..., n], [..., m] → [n, m] in float32; a is rounded to b's dtype."""
    a, b = a.flatten(0, -2).t(), b.flatten(0, -2)
    with without_autocast(b.device.type):
        if b.is_cuda and b.dtype != torch.float32:
            return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
        return a.float() @ b.float()
