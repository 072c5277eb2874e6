"""Linear maps whose three products run in fp8: the output, the gradient of the input, and that of the weight.

Each matrix is rounded once and written in both layouts, because the tensor cores read fp8 along the dimension that
is summed over: rows for one product, columns for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.kernels.fp8.op import cast_op, geglu_backward_op, geglu_op, geglu_scales_op, product_op, transpose_op
from altup.kernels.fp8.reference import VALUE, power_of_two, quantize_reference
from altup.kernels.launch import can_launch

ROW_GROUPS = 16  # of a matrix's rows, whose number is a multiple of it


class Rounded(NamedTuple):
    """A matrix in 8 bits, its transpose, and their scale."""

    q: Tensor
    transposed: Tensor
    scale: Tensor


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool = True
) -> Tensor:
    """a·bᵀ, see `product_reference`.

    `fast` keeps sums in the tensor cores, which truncate them to some 14 bits: good enough for the thousands of
    terms of a layer's width, not for those of all tokens.
    """
    return product_op(a, b, scale_a, scale_b, dtype, fast)


def round_values(x: Tensor, bound: Tensor | None = None, q: Tensor | None = None) -> Rounded:
    """Activations [m, n]. With a `bound` of their size, compiled code rounds them where it makes them; else it
    finds the largest there. Where q is given, that is x in 8 bits, `bound` its scale, and x is not read."""
    if q is not None and bound is not None:
        return Rounded(q, transpose_op(q), bound)
    if bound is None:
        return Rounded(*cast_op([x], _largest(x), x.dtype, False))
    if not torch.compiler.is_compiling():
        return Rounded(*cast_op([x], bound.float().reshape(1), x.dtype, False))
    scale = power_of_two(bound, VALUE)
    q = quantize_reference(x, scale, VALUE)
    return Rounded(q, transpose_op(q), scale)


def round_gradients(parts: Sequence[Tensor], largest: Tensor | None = None) -> Rounded:
    """Gradients [m, nᵢ], side by side; `largest` as `cast_op` takes it."""
    if largest is None and len(parts) == 1:
        largest = _largest(parts[0])
    return Rounded(*cast_op(list(parts), largest, parts[0].dtype, True))


def round_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> Rounded:
    """Weights [nᵢ, k], one below the other, first rounded to the `dtype` that products would else have."""
    return Rounded(*cast_op([w.detach() for w in weights], None, dtype, False, True))


def round_many_weights(weights: Sequence[Tensor], each: int, dtype: torch.dtype) -> list[Rounded]:
    """`round_weights` of every `each` weights that follow one another; all are alike, [m, n], m a multiple of 4,
    and placed as kernels read them (`can_read`)."""
    if not can_launch(weights[0].device):
        return [round_weights(weights[i : i + each], dtype) for i in range(0, len(weights), each)]
    from altup.kernels.fp8.many_triton import round_many

    groups, (m, n) = len(weights) // each, weights[0].shape
    q = weights[0].new_empty(groups, each * m, n, dtype=VALUE)
    transposed = weights[0].new_empty(groups, n, each * m, dtype=VALUE)
    scales = weights[0].new_empty(groups, 4, dtype=torch.float32)[:, 0]  # 16 bytes apart, as cuBLAS wants them
    with torch.cuda.device_of(weights[0]):
        round_many(q, transposed, scales, [weight.detach() for weight in weights], dtype)
    return [Rounded(*parts) for parts in zip(q, transposed, scales, strict=True)]


def _largest(x: Tensor) -> Tensor:
    """By rows first, so that compiled code does it where it makes the rows; the cast takes the last step."""
    return x.abs().amax(-1).float().view(ROW_GROUPS, -1).amax(-1)


def _given(q: Tensor | None, transposed: Tensor | None, scale: Tensor | None) -> Rounded | None:
    return None if q is None else Rounded(q, transposed, scale)  # type: ignore[arg-type]


class LinearMaps(torch.autograd.Function):
    """x [m, k], perhaps a bound of its size, and weights [nᵢ, k] → x·weightᵢᵀ, each [m, nᵢ].

    x_q is x in 8 bits where that is known, and `bound` its scale (`round_values`).
    q, transposed and scale are the weights as `round_weights` rounds them, where that is done.

    With `slots` they are followed by that many numbers, whose gradient must be the largest numbers of the others':
    as `attention` gives them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bound: Tensor | None,
        x_q: Tensor | None,
        slots: int,
        q: Tensor | None,
        transposed: Tensor | None,
        scale: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        value = round_values(x, bound, x_q)
        weight = _given(q, transposed, scale) or round_weights(weights, x.dtype)
        ctx.save_for_backward(value.transposed, value.scale, weight.transposed, weight.scale)
        ctx.dtypes = x.dtype, weights[0].dtype
        ctx.rows = [weight.shape[0] for weight in weights]
        ctx.slots = slots
        y = product(value.q, weight.q, value.scale, weight.scale, x.dtype).split(ctx.rows, dim=1)
        return (*y, x.new_zeros(slots, dtype=torch.float32)) if slots else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        value, value_scale, weight, weight_scale = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        grad = round_gradients(grads[:-1], grads[-1]) if ctx.slots else round_gradients(grads)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(grad.q, weight, grad.scale, weight_scale, dtype)
        if any(ctx.needs_input_grad[7:]):
            dw = product(grad.transposed, value, grad.scale, value_scale, weight_dtype, fast=False)
        return dx, *[None] * 6, *([None] * len(ctx.rows) if dw is None else dw.split(ctx.rows))


class FeedForward(torch.autograd.Function):
    """wo(gelu(wi_0·x) ⊙ wi_1·x) of x [m, k], where nothing is written in 16 bits but wi·x.

    x_q as in `LinearMaps`; `rounded`: q, transposed and scale of wi, and of wo, as there. The gradient of wi·x
    is rounded in the pass that makes it, so its scale must be known before (`geglu_scales_reference`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bound: Tensor | None,
        x_q: Tensor | None,
        wi_0: Tensor,
        wi_1: Tensor,
        wo: Tensor,
        *rounded: Tensor | None,
    ) -> Tensor:
        value = round_values(x, bound, x_q)
        wi = _given(*rounded[:3]) or round_weights([wi_0, wi_1], x.dtype)
        out = _given(*rounded[3:]) or round_weights([wo], x.dtype)
        h = product(value.q, wi.q, value.scale, wi.scale, x.dtype)
        hidden, scales, peaks = geglu_op(h)
        columns = torch.linalg.vector_norm(wo, dim=0, dtype=torch.float32)
        ctx.save_for_backward(
            value.transposed, value.scale, wi.transposed, wi.scale, out.transposed, out.scale, h, peaks, columns
        )
        ctx.dtypes = x.dtype, wo.dtype
        return product(hidden, out.q, scales, out.scale.expand(1, wo.shape[0]).contiguous(), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        value, value_scale, wi, wi_scale, wo, wo_scale, h, peaks, columns = ctx.saved_tensors
        dtype, weight_dtype = ctx.dtypes
        grad = round_gradients([dy])
        d_hidden = product(grad.q, wo, grad.scale, wo_scale, dtype)
        rows = torch.linalg.vector_norm(dy, dim=-1, dtype=torch.float32)
        hidden_scale, h_scale = geglu_scales_op(rows, columns, peaks)
        d_h, d_h_transposed, hidden = geglu_backward_op(d_hidden, h, hidden_scale, h_scale)
        dx = product(d_h, wi, h_scale, wi_scale, dtype)
        d_wi = product(d_h_transposed, value, h_scale, value_scale, weight_dtype, fast=False)
        d_wo = product(grad.transposed, hidden, grad.scale, hidden_scale, weight_dtype, fast=False)
        return dx, None, None, *d_wi.chunk(2), d_wo, *[None] * 6
