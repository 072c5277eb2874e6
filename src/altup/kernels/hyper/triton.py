"""The kernels of hyper-connections' coefficients. The state is read and written by `altup_update_dynamic`'s.

`logits`: with r = 1 / rms of a token's K·d numbers x, w = r·W·x and the upstream gradient G of w,

    dx = r·Wᵀ·G − x·r²·⟨G, w⟩ / (K·d),    dW = Σ over tokens of r·G ⊗ x.

A program takes some tokens and walks through their columns once; dW is an ordinary product.

`from_logits`: a lane is a token, whose numbers are in registers. Backward, what was before each of Sinkhorn's
rounds is recomputed from the beginning, not stored. With c' = c / s, s = Σc + ε over a row or column, and the
gradient H of c', that of c is (H − Σ H ∘ c') / s.
"""

# Inside a kernel a tuple grows by concatenation; Triton has neither unpacking nor comprehensions over ranges.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from altup.kernels.gemma3n.tokens import outer_sum
from altup.kernels.launch import ceil_div, flat, power_of_two
from altup.kernels.operators import Gradients, operator

TOKENS, COLUMNS, WARPS = 32, 64, 4  # of a program of `logits` and its backward pass; not timed yet
LANES = 32  # tokens of a program of `from_logits`


def _steps(x: Tensor, dim: int) -> dict[str, int]:
    """Tokens of a contiguous state, and the steps from token to token and from block to block."""
    K, d = x.shape[dim], x.shape[-1]
    tokens = x.numel() // (K * d)
    row, block = (K * d, d) if dim else (d, tokens * d)
    return {"tokens": tokens, "row": row, "block": block, "d": d}


@operator("altup::hyper_logits")
def logits(x: Tensor, weight: Tensor, eps: float, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """w: [..., M] and r: [...], float32, of a state whose blocks lie along `dim`; weight: [M, K·d], float32."""
    K, d, M = x.shape[dim], x.shape[-1], len(weight)
    shape = x.shape[:-2] if dim else x.shape[1:-1]
    w, r = x.new_empty(*shape, M, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)
    yield w, r
    x, weight = flat((x, weight))
    _logits_kernel[(ceil_div(r.numel(), TOKENS),)](
        w, r, x, weight, **_steps(x, dim), eps=eps, K=K, M=M, ROWS=TOKENS, COLUMNS=_columns(d), WIDE=_wide(M),
        PRECISION=_precision(x), num_warps=WARPS,
    )  # fmt: skip


@operator("altup::hyper_logits_backward")
def logits_backward(d_raw: Tensor, along: Tensor, x: Tensor, weight: Tensor, dim: int) -> Iterator[Tensor]:
    """That of x, from r·G: [..., M] and r²·⟨G, w⟩ / (K·d): [...]."""
    K, d, M = x.shape[dim], x.shape[-1], len(weight)
    dx = x.new_empty(x.shape)
    yield dx
    d_raw, along, x, weight = flat((d_raw, along, x, weight))
    columns = _columns(d)
    _logits_backward_kernel[(ceil_div(along.numel(), TOKENS), K, ceil_div(d, columns))](
        dx, d_raw, along, x, weight, **_steps(x, dim), K=K, M=M, ROWS=TOKENS, COLUMNS=columns, WIDE=_wide(M),
        PRECISION=_precision(x), num_warps=WARPS,
    )  # fmt: skip


@logits.gradient
def _(
    d_w: Tensor, _r: None, *, x: Tensor, weight: Tensor, dim: int, w: Tensor, r: Tensor, needs: set[str]
) -> Gradients:
    d_raw = d_w * r.unsqueeze(-1)
    dx = dW = None
    if "x" in needs:
        along = r.square() * (d_w * w).sum(dim=-1) / weight.shape[1]
        dx = logits_backward(d_raw, along, x, weight, dim)
    if "weight" in needs:
        blocks = (x.flatten(-2),) if dim else x.unbind(0)
        dW = torch.cat([outer_sum(d_raw, block) for block in blocks], dim=-1)
    return {"x": dx, "weight": dW}


def _columns(d: int) -> int:
    return min(COLUMNS, max(16, power_of_two(d)))


def _wide(M: int) -> int:
    """What matrix units multiply: 16 columns or more."""
    return max(16, power_of_two(M))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _logits_kernel(
    w, r, x, weight, tokens, row, block, d, eps,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    number = tl.arange(0, WIDE)
    lanes = tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, WIDE], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(K):
        for column in range(0, d, COLUMNS):
            inside = lanes < d - column
            mask = (token < tokens)[:, None] & inside[None, :]
            value = tl.load(
                x + (token * row)[:, None] + (k * block + column + lanes)[None, :], mask=mask, other=0.0
            )
            value = value.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
            part = number[None, :] * (K * d) + (k * d + column + lanes)[:, None]
            maps = tl.load(weight + part, mask=inside[:, None] & (number < M)[None, :], other=0.0)
            acc = tl.dot(value, maps, acc, input_precision=PRECISION)
    inverse = 1.0 / tl.sqrt(squares / (K * d) + eps)
    tl.store(r + token, inverse, mask=token < tokens)
    offset = (token * M)[:, None] + number[None, :]
    tl.store(w + offset, acc * inverse[:, None], mask=(token < tokens)[:, None] & (number < M)[None, :])


@triton.jit
def _logits_backward_kernel(
    dx, d_raw, along, x, weight, tokens, row, block, d,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, WIDE)
    known = token < tokens
    grad = tl.load(
        d_raw + (token * M)[:, None] + number[None, :], mask=known[:, None] & (number < M)[None, :], other=0.0
    )
    part = number[:, None] * (K * d) + (k * d + column)[None, :]
    maps = tl.load(weight + part, mask=(number < M)[:, None] & (column < d)[None, :], other=0.0)
    offset = (token * row)[:, None] + (k * block + column)[None, :]
    mask = known[:, None] & (column < d)[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    share = tl.load(along + token, mask=known, other=0.0)
    result = tl.dot(grad, maps, input_precision=PRECISION) - share[:, None] * value
    tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)


@operator("altup::hyper_from_logits")
def from_logits(u: Tensor, eps: float, rounds: int, K: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """a, b: [..., K] and what Sinkhorn makes of the rest, [..., K, K], of u: [..., 2K + K²], float32."""
    tokens = u.shape[:-1]
    a, b, mix = u.new_empty(*tokens, K), u.new_empty(*tokens, K), u.new_empty(*tokens, K, K)
    yield a, b, mix
    count = u.numel() // (2 * K + K * K)
    _from_logits_kernel[(ceil_div(count, LANES),)](
        a, b, mix, u.contiguous(), count, eps, rounds, K=K, LANES=LANES, num_warps=1
    )


@operator("altup::hyper_from_logits_backward")
def from_logits_backward(
    da: Tensor, db: Tensor, d_mix: Tensor, u: Tensor, eps: float, rounds: int, K: int
) -> Iterator[Tensor]:
    du = u.new_empty(u.shape)
    yield du
    count = u.numel() // (2 * K + K * K)
    _from_logits_backward_kernel[(ceil_div(count, LANES),)](
        du, *flat((da, db, d_mix, u)), count, eps, rounds, K=K, LANES=LANES, num_warps=1
    )


@from_logits.gradient
def _(d_a: Tensor, d_b: Tensor, d_mix: Tensor, *, u: Tensor, eps: float, rounds: int, K: int) -> Gradients:
    return {"u": from_logits_backward(d_a, d_b, d_mix, u, eps, rounds, K)}


@triton.jit
def _load_all(pointer, token, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    numbers = ()
    for i in tl.static_range(COUNT):
        numbers = numbers + (tl.load(pointer + token * STEP + (FIRST + i), mask=mask, other=0.0),)
    return numbers


@triton.jit
def _sums(c, eps, K: tl.constexpr, BY_ROWS: tl.constexpr):
    """Of rows or of columns, and ε."""
    sums = ()
    for i in tl.static_range(K):
        total = c[i * K if BY_ROWS else i] + eps
        for j in tl.static_range(1, K):
            total += c[i * K + j if BY_ROWS else j * K + i]
        sums = sums + (total,)
    return sums


@triton.jit
def _normalized(c, eps, K: tl.constexpr, BY_ROWS: tl.constexpr):
    sums = _sums(c, eps, K, BY_ROWS)
    new = ()
    for n in tl.static_range(K * K):
        new = new + (c[n] / sums[n // K if BY_ROWS else n % K],)
    return new


@triton.jit
def _normalized_backward(d, c, eps, K: tl.constexpr, BY_ROWS: tl.constexpr):
    """The gradient of c, given that of what `_normalized` makes of it."""
    sums = _sums(c, eps, K, BY_ROWS)
    products = ()
    for n in tl.static_range(K * K):
        products = products + (d[n] * c[n] / sums[n // K if BY_ROWS else n % K],)
    along = _sums(products, 0.0, K, BY_ROWS)
    new = ()
    for n in tl.static_range(K * K):
        new = new + ((d[n] - along[n // K if BY_ROWS else n % K]) / sums[n // K if BY_ROWS else n % K],)
    return new


@triton.jit
def _softmax(u, K: tl.constexpr):
    """Of each row."""
    shifted = ()
    for i in tl.static_range(K):
        top = u[i * K]
        for j in tl.static_range(1, K):
            top = tl.maximum(top, u[i * K + j])
        for j in tl.static_range(K):
            shifted = shifted + (tl.exp(u[i * K + j] - top),)
    return _normalized(shifted, 0.0, K, True)


@triton.jit
def _after(c, eps, rounds, K: tl.constexpr):
    """So many of Sinkhorn's rounds later."""
    for _ in range(rounds):
        c = _normalized(_normalized(c, eps, K, True), eps, K, False)
    return c


@triton.jit
def _plus(c, eps, K: tl.constexpr):
    new = ()
    for n in tl.static_range(K * K):
        new = new + (c[n] + eps,)
    return new


@triton.jit(do_not_specialize=["rounds"])
def _from_logits_kernel(a, b, mix, u, tokens, eps, rounds, K: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = token < tokens
    M: tl.constexpr = 2 * K + K * K
    ends = _load_all(u, token, mask, 0, 2 * K, M)
    for k in tl.static_range(K):
        tl.store(a + token * K + k, tl.sigmoid(ends[k]) + eps, mask=mask)
        tl.store(b + token * K + k, 2.0 * tl.sigmoid(ends[K + k]), mask=mask)
    c = _plus(_softmax(_load_all(u, token, mask, 2 * K, K * K, M), K), eps, K)
    c = _after(_normalized(c, eps, K, False), eps, rounds - 1, K)
    for n in tl.static_range(K * K):
        tl.store(mix + token * (K * K) + n, c[n], mask=mask)


@triton.jit(do_not_specialize=["rounds"])
def _from_logits_backward_kernel(du, da, db, d_mix, u, tokens, eps, rounds, K: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = token < tokens
    M: tl.constexpr = 2 * K + K * K
    ends = _load_all(u, token, mask, 0, 2 * K, M)
    d_a = _load_all(da, token, mask, 0, K, K)
    d_b = _load_all(db, token, mask, 0, K, K)
    for k in tl.static_range(K):
        of_a = tl.sigmoid(ends[k])
        of_b = tl.sigmoid(ends[K + k])
        tl.store(du + token * M + k, d_a[k] * of_a * (1.0 - of_a), mask=mask)
        tl.store(du + token * M + K + k, 2.0 * d_b[k] * of_b * (1.0 - of_b), mask=mask)

    soft = _softmax(_load_all(u, token, mask, 2 * K, K * K, M), K)
    before = _plus(soft, eps, K)
    first = _normalized(before, eps, K, False)
    d = _load_all(d_mix, token, mask, 0, K * K, K * K)
    for n in range(rounds - 1):
        c = _after(first, eps, rounds - 2 - n, K)
        d = _normalized_backward(d, _normalized(c, eps, K, True), eps, K, False)
        d = _normalized_backward(d, c, eps, K, True)
    d = _normalized_backward(d, before, eps, K, False)
    products = ()
    for n in tl.static_range(K * K):
        products = products + (d[n] * soft[n],)
    along = _sums(products, 0.0, K, True)
    for n in tl.static_range(K * K):
        tl.store(du + token * M + 2 * K + n, soft[n] * (d[n] - along[n // K]), mask=mask)
