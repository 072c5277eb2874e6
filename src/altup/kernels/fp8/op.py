"""Rounding to 8 bits, and products, as custom operators of PyTorch, opaque to `torch.compile`.

On a CPU they compute the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from altup.kernels.fp8 import reference
from altup.kernels.fp8.reference import GRADIENT, VALUE, parts_of
from altup.kernels.launch import can_launch, on_its_device


@library.custom_op("altup::fp8_product", mutates_args=())
def product_op(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """As `product_reference`, by cuBLAS on a GPU.

    An operator of ours, because the compiler would try kernels of its own in the place of PyTorch's.
    """
    if not a.is_cuda:
        return reference.product_reference(a, b, scale_a, scale_b, dtype)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


@product_op.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


@library.custom_op("altup::fp8_largest", mutates_args=())
@on_its_device
def largest_op(x: Tensor) -> Tensor:
    """The largest |x| of each of the parts of x, float32; NaN where there is one."""
    if not can_launch(x.device):
        return x.abs().amax().float().repeat(parts_of(x.numel()))
    from altup.kernels.fp8 import triton as kernels

    out = torch.empty(parts_of(x.numel()), device=x.device)
    kernels.largest(out, x.contiguous())
    return out


@largest_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(parts_of(x.numel()), device=x.device)


@library.custom_op(
    "altup::fp8_cast",
    mutates_args=(),
    schema="(Tensor[] parts, Tensor largest, bool gradient) -> (Tensor, Tensor, Tensor)",
)
@on_its_device
def cast_op(parts: Sequence[Tensor], largest: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices [m, nᵢ], side by side, divided by a scale and rounded: [m, n], its transpose [n, m], and the scale.

    largest: float32 numbers, a power of two of them, the largest of which is the largest of the matrices.
    """
    q, transposed, scale = _cast_results(parts, largest, gradient)
    # Not for float32: of one rounded value in both layouts ptxas 12.8 makes a wrong transpose, as `geglu_backward`
    # tells.
    launches = can_launch(largest.device) and all(part.dtype != torch.float32 for part in parts)
    if not launches:
        scale = reference.power_of_two(largest.amax(), q.dtype)
    begin = 0
    for part in parts:
        end = begin + part.shape[1]
        if launches:
            from altup.kernels.fp8 import triton as kernels

            rows = part if part.stride(1) == 1 else part.contiguous()
            kernels.cast(q[:, begin:end], transposed[begin:end], scale, rows, largest)
        else:
            low = reference.quantize_reference(part, scale, q.dtype).view(torch.uint8)
            q.view(torch.uint8)[:, begin:end] = low
            transposed.view(torch.uint8)[begin:end] = low.t()
        begin = end
    return q, transposed, scale


@cast_op.register_fake
def _cast_results(parts: Sequence[Tensor], largest: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    m, n = parts[0].shape[0], sum(part.shape[1] for part in parts)
    dtype = GRADIENT if gradient else VALUE
    return largest.new_empty(m, n, dtype=dtype), largest.new_empty(n, m, dtype=dtype), largest.new_empty(())


@library.custom_op("altup::fp8_transpose", mutates_args=())
@on_its_device
def transpose_op(q: Tensor) -> Tensor:
    """qᵀ, contiguous, as q is."""
    if not can_launch(q.device):
        return q.t().contiguous()
    from altup.kernels.fp8 import triton as kernels

    out = q.new_empty(q.shape[1], q.shape[0])
    kernels.transpose(out.view(torch.uint8), q.view(torch.uint8))
    return out


@transpose_op.register_fake
def _(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0])


@library.custom_op("altup::fp8_geglu", mutates_args=())
@on_its_device
def geglu_op(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `geglu_reference`; h is contiguous."""
    if not can_launch(h.device):
        return reference.geglu_reference(h)
    from altup.kernels.fp8 import triton as kernels

    q, scale, peaks = _geglu_results(h)
    kernels.geglu(q, scale, peaks, h)
    return q, scale, peaks


@geglu_op.register_fake
def _geglu_results(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, n = h.shape[0], h.shape[1] // 2
    scale, peaks = (h.new_empty(m, numbers, dtype=torch.float32) for numbers in (1, 3))
    return h.new_empty(m, n, dtype=VALUE), scale, peaks


@library.custom_op("altup::fp8_geglu_backward", mutates_args=())
@on_its_device
def geglu_backward_op(
    grad: Tensor, h: Tensor, hidden_scale: Tensor, grad_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `geglu_backward_reference`; grad and h are contiguous."""
    if not can_launch(h.device):
        return reference.geglu_backward_reference(grad, h, hidden_scale, grad_scale)
    from altup.kernels.fp8 import triton as kernels

    q, transposed, hidden = _geglu_gradients(grad, h)
    kernels.geglu_backward(q, transposed, hidden, grad, h, hidden_scale, grad_scale)
    return q, transposed, hidden


@geglu_backward_op.register_fake
def _geglu_gradients(grad: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, n = grad.shape
    return (
        grad.new_empty(m, 2 * n, dtype=GRADIENT),
        grad.new_empty(2 * n, m, dtype=GRADIENT),
        grad.new_empty(n, m, dtype=VALUE),
    )
