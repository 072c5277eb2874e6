"""Triton kernels of Algorithm 2's update: one pass over the sequence forward, one backward.

With c = a₂ − b (a₁ + a₂), upstream gradients G and their sum over a window w = Σᵢ Gᵢ:

    forward     yᵢ = a₁ xᵢ + c x_anchor + b ỹ_anchor
    backward    dxᵢ = a₁ Gᵢ (+ c w for the anchor),    dỹ = b w
                da₁ = Σ Gᵢ xᵢ − b s,    da₂ = (1 − b) s,    db = Σ w ỹ − (a₁ + a₂) s    with s = Σ w x_anchor

A thread takes WIDTH neighbouring numbers of all tokens of a window. Arithmetic is float32; the three sums are kept
in registers, written once by each program and added up in a fixed order.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.launch import Config, ceil_div, flat, multiprocessors
from altup.kernels.operators import Gradients, operator

FORWARD = Config(warps=4, vectors=1)
# By the longest stride it is for: a thread holds a window, so longer ones leave room for fewer programs.
BACKWARD = {
    4: Config(warps=4, vectors=1, programs_per_sm=7),
    8: Config(warps=4, vectors=1, programs_per_sm=4),
    16: Config(warps=4, vectors=1, programs_per_sm=2),
}
COEFFICIENTS = Config(warps=8, vectors=4)


@triton.jit
def _places(first, count, tokens, windows, per_row, STRIDE: tl.constexpr, VECTORS: tl.constexpr):
    """Which of VECTORS vectors exist, their offsets in `computed` and (the anchor's) in x, the anchor's token."""
    vector = first + tl.arange(0, VECTORS)
    row = vector // per_row
    token = row % windows * STRIDE
    anchor = (row // windows * tokens + token) * per_row + vector % per_row
    return vector < count, vector, anchor, token


@triton.jit
def _elements(vector, WIDTH: tl.constexpr):
    return vector.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load(pointer, vector, mask, WIDTH: tl.constexpr):
    return tl.load(pointer + _elements(vector, WIDTH), mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def _load_window(pointer, anchor, real, token, tokens, per_row, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The vectors of all tokens of a window: all loads are on their way before the first is needed."""
    loaded = ()
    for i in tl.static_range(STRIDE):
        loaded = loaded + (_load(pointer, anchor + i * per_row, real & (token + i < tokens), WIDTH),)
    return loaded


@triton.jit
def _store(pointer, vector, value, mask, WIDTH: tl.constexpr):
    tl.store(pointer + _elements(vector, WIDTH), value.to(pointer.dtype.element_ty), mask=mask[:, None])


@triton.jit(do_not_specialize=["count", "tokens", "windows", "per_row"])
def _forward_kernel(
    out,
    x,
    computed,
    a,
    b,
    count,
    tokens,
    windows,
    per_row,
    STRIDE: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    a1, a2, b1 = tl.load(a), tl.load(a + 1), tl.load(b)
    first = tl.program_id(0) * VECTORS
    real, window, anchor, token = _places(first, count, tokens, windows, per_row, STRIDE, VECTORS)
    y = _load(computed, window, real, WIDTH)
    x_i = _load_window(x, anchor, real, token, tokens, per_row, STRIDE, WIDTH)
    shared = (a2 - b1 * (a1 + a2)) * x_i[0] + b1 * y
    for i in tl.static_range(STRIDE):
        _store(out, anchor + i * per_row, a1 * x_i[i] + shared, real & (token + i < tokens), WIDTH)


@triton.jit(do_not_specialize=["count", "tokens", "windows", "per_row"])
def _backward_kernel(
    dx,
    d_computed,
    partials,
    grad,
    x,
    computed,
    a,
    b,
    count,
    tokens,
    windows,
    per_row,
    STRIDE: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    a1, a2, b1 = tl.load(a), tl.load(a + 1), tl.load(b)
    programs = tl.num_programs(0)
    of_tokens = tl.zeros([VECTORS], tl.float32)
    of_anchors = tl.zeros([VECTORS], tl.float32)
    of_computed = tl.zeros([VECTORS], tl.float32)
    for chunk in tl.range(tl.program_id(0), tl.cdiv(count, VECTORS), programs, num_stages=STAGES):
        real, window, anchor, token = _places(chunk * VECTORS, count, tokens, windows, per_row, STRIDE, VECTORS)
        y = _load(computed, window, real, WIDTH)
        x_i = _load_window(x, anchor, real, token, tokens, per_row, STRIDE, WIDTH)
        g_i = _load_window(grad, anchor, real, token, tokens, per_row, STRIDE, WIDTH)
        total = g_i[0]
        products = g_i[0] * x_i[0]
        for i in tl.static_range(1, STRIDE):
            total += g_i[i]
            products += g_i[i] * x_i[i]
            _store(dx, anchor + i * per_row, a1 * g_i[i], real & (token + i < tokens), WIDTH)
        _store(dx, anchor, a1 * g_i[0] + (a2 - b1 * (a1 + a2)) * total, real, WIDTH)
        _store(d_computed, window, b1 * total, real, WIDTH)
        of_tokens += tl.sum(products, axis=1)
        of_anchors += tl.sum(total * x_i[0], axis=1)
        of_computed += tl.sum(total * y, axis=1)
    partials += tl.program_id(0)
    tl.store(partials, tl.sum(of_tokens))
    tl.store(partials + programs, tl.sum(of_anchors))
    tl.store(partials + 2 * programs, tl.sum(of_computed))


@triton.jit(do_not_specialize=["programs"])
def _coefficients_kernel(da, db, partials, a, b, programs, CHUNK: tl.constexpr):
    """da and db from the partial sums [3, programs]."""
    sums = tl.zeros([4, CHUNK], tl.float32)
    row = tl.arange(0, 4)[:, None]
    for start in range(0, programs, CHUNK):
        program = start + tl.arange(0, CHUNK)[None, :]
        sums += tl.load(partials + row * programs + program, mask=(row < 3) & (program < programs), other=0.0)
    total = tl.sum(sums, axis=1)
    offset = tl.arange(0, 4)
    of_tokens = tl.sum(tl.where(offset == 0, total, 0.0))
    of_anchors = tl.sum(tl.where(offset == 1, total, 0.0))
    of_computed = tl.sum(tl.where(offset == 2, total, 0.0))
    tl.store(da, of_tokens - tl.load(b) * of_anchors)
    tl.store(da + 1, (1.0 - tl.load(b)) * of_anchors)
    tl.store(db, of_computed - (tl.load(a) + tl.load(a + 1)) * of_anchors)


@operator("altup::sequence_update")
def sequence_update_op(x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Iterator[Tensor]:
    """x: [batch, T, d], computed: [batch, ⌈T/stride⌉, d], a: [2] and b: [1] in float32."""
    out = x.new_empty(x.shape)
    yield out
    x, computed, a, b = flat((x, computed, a, b))
    width, sizes = _sizes(x, computed)
    vectors = 32 * FORWARD.warps * FORWARD.vectors
    if sizes[0]:
        _forward_kernel[(ceil_div(sizes[0], vectors),)](
            out, x, computed, a, b, *sizes, STRIDE=stride, VECTORS=vectors, WIDTH=width, num_warps=FORWARD.warps
        )


@operator("altup::sequence_update_backward")
def sequence_update_backward(
    grad: Tensor, x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The gradients of x, computed, a and b."""
    dx, d_computed, da, db = (t.new_empty(t.shape) for t in (x, computed, a, b))
    yield dx, d_computed, da, db
    grad, x, computed, a, b = flat((grad, x, computed, a, b))
    width, sizes = _sizes(x, computed)
    config = next(config for longest, config in BACKWARD.items() if stride <= longest)
    vectors = 32 * config.warps * config.vectors
    programs = max(1, min(ceil_div(sizes[0], vectors), config.programs_per_sm * multiprocessors(x.device)))
    partials = torch.empty(3, programs, device=x.device, dtype=torch.float32)
    _backward_kernel[(programs,)](
        dx, d_computed, partials, grad, x, computed, a, b, *sizes,
        STRIDE=stride, VECTORS=vectors, WIDTH=width, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    chunk = COEFFICIENTS.vectors * 32 * COEFFICIENTS.warps
    _coefficients_kernel[(1,)](da, db, partials, a, b, programs, CHUNK=chunk, num_warps=COEFFICIENTS.warps)


@sequence_update_op.gradient
def _(d_out: Tensor, *, x: Tensor, computed: Tensor, a: Tensor, b: Tensor, stride: int) -> Gradients:
    gradients = sequence_update_backward(d_out, x, computed, a, b, stride)
    return dict(zip(("x", "computed", "a", "b"), gradients, strict=True))


def _sizes(x: Tensor, computed: Tensor) -> tuple[int, tuple[int, int, int, int]]:
    """Numbers in a vector; vectors in `computed`, tokens, windows, and vectors in a token.

    A vector has at most 16 bytes and does not reach into the next token.
    """
    (batch, windows, d), tokens = computed.shape, x.shape[1]
    width = 16 // max(x.element_size(), computed.element_size())
    while d % width:
        width //= 2
    return width, (batch * windows * d // width, tokens, windows, d // width)
