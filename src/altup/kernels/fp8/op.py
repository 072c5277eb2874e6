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


@library.custom_op(
    "altup::fp8_cast",
    mutates_args=(),
    schema="(Tensor[] parts, Tensor? largest, ScalarType dtype, bool gradient, bool below=False) -> "
    "(Tensor, Tensor, Tensor)",
)
@on_its_device
def cast_op(
    parts: Sequence[Tensor], largest: Tensor | None, dtype: torch.dtype, gradient: bool, below: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices [m, nᵢ], side by side, divided by a scale and rounded: [m, n], its transpose [n, m], and the scale.

    With `below` they are [mᵢ, n] and go one below the other. largest: float32 numbers, the largest of which is the
    largest of the matrices, where that is known. All are first rounded to `dtype`.
    """
    q, transposed, scale = _cast_results(parts, largest, dtype, gradient, below)
    if can_launch(q.device):
        from altup.kernels.fp8 import triton as kernels

        parts = [part if part.stride(1) == 1 and part.data_ptr() % 16 == 0 else part.clone() for part in parts]
        largest = _find_largest(parts, dtype) if largest is None else largest
        kernels.cast(q, transposed, scale, parts, largest, dtype, below)
        return q, transposed, scale
    whole = torch.cat([part.to(dtype) for part in parts], dim=0 if below else 1)
    scale = reference.power_of_two((whole if largest is None else largest).abs().amax(), q.dtype)
    q = reference.quantize_reference(whole, scale, q.dtype)
    return q, q.t().contiguous(), scale


def _find_largest(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest numbers of the parts' parts; in one launch if they are alike."""
    from altup.kernels.fp8 import triton as kernels

    parts = [part.contiguous() for part in parts]
    if any(part.shape != parts[0].shape for part in parts):
        return torch.cat([_find_largest([part], dtype) for part in parts])
    out = torch.empty(len(parts) * parts_of(parts[0].numel(), len(parts)), device=parts[0].device)
    kernels.largest(out, parts, dtype)
    return out


@cast_op.register_fake
def _cast_results(
    parts: Sequence[Tensor], largest: Tensor | None, dtype: torch.dtype, gradient: bool, below: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    first = parts[0]
    m, n = first.shape
    m, n = (sum(part.shape[0] for part in parts), n) if below else (m, sum(part.shape[1] for part in parts))
    low = GRADIENT if gradient else VALUE
    scale = first.new_empty((), dtype=torch.float32)
    return first.new_empty(m, n, dtype=low), first.new_empty(n, m, dtype=low), scale


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


@library.custom_op("altup::fp8_geglu_scales", mutates_args=())
@on_its_device
def geglu_scales_op(rows: Tensor, columns: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """As `geglu_scales_reference`, in one launch; all are contiguous."""
    if not can_launch(peaks.device):
        return reference.geglu_scales_reference(rows, columns, peaks)
    from altup.kernels.fp8 import triton as kernels

    hidden_scale, grad_scale = _geglu_scales(rows, columns, peaks)
    kernels.geglu_scales(hidden_scale, grad_scale, rows, columns, peaks)
    return hidden_scale, grad_scale


@geglu_scales_op.register_fake
def _geglu_scales(rows: Tensor, columns: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    return peaks.new_empty(()), peaks.new_empty(())


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
