"""Rounding to 8 bits, and products, as custom operators of PyTorch, opaque to `torch.compile`.

On a CPU they compute the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, library

from altup.kernels.fp8 import reference
from altup.kernels.fp8.reference import GRADIENT, VALUE, parts_of
from altup.kernels.launch import can_launch
from altup.kernels.operators import operator


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


@operator("altup::fp8_cast")
def cast_op(
    parts: Sequence[Tensor], largest: Tensor | None, dtype: torch.dtype, gradient: bool, below: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Matrices [m, nᵢ], side by side, divided by a scale and rounded: [m, n], its transpose [n, m], and the scale.

    With `below` they are [mᵢ, n] and go one below the other. largest: float32 numbers, the largest of which is the
    largest of the matrices, where that is known. All are first rounded to `dtype`.
    """
    first = parts[0]
    m, n = first.shape
    m, n = (sum(len(part) for part in parts), n) if below else (m, sum(part.shape[1] for part in parts))
    fp8 = GRADIENT if gradient else VALUE
    q, transposed = first.new_empty(m, n, dtype=fp8), first.new_empty(n, m, dtype=fp8)
    scale = first.new_empty((), dtype=torch.float32)
    yield q, transposed, scale
    if can_launch(q.device):
        from altup.kernels.fp8 import triton as kernels

        parts = [part if part.stride(1) == 1 and part.data_ptr() % 16 == 0 else part.clone() for part in parts]
        largest = _find_largest(parts, dtype) if largest is None else largest
        kernels.cast(q, transposed, scale, parts, largest, dtype, below)
        return
    whole = torch.cat([part.to(dtype) for part in parts], dim=0 if below else 1)
    scale.copy_(reference.power_of_two((whole if largest is None else largest).abs().amax(), fp8))
    q.copy_(reference.quantize_reference(whole, scale, fp8))
    transposed.copy_(q.t())


def _find_largest(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest numbers of the parts' parts; in one launch if they are alike."""
    from altup.kernels.fp8 import triton as kernels

    parts = [part.contiguous() for part in parts]
    if any(part.shape != parts[0].shape for part in parts):
        return torch.cat([_find_largest([part], dtype) for part in parts])
    out = torch.empty(len(parts) * parts_of(parts[0].numel(), len(parts)), device=parts[0].device)
    kernels.largest(out, parts, dtype)
    return out


@operator("altup::fp8_transpose")
def transpose_op(q: Tensor) -> Iterator[Tensor]:
    """qᵀ, contiguous, as q is."""
    out = q.new_empty(q.shape[1], q.shape[0])
    yield out
    if can_launch(q.device):
        from altup.kernels.fp8 import triton as kernels

        kernels.transpose(out.view(torch.uint8), q.view(torch.uint8))
    else:
        out.copy_(q.t())


@operator("altup::fp8_geglu")
def geglu_op(h: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `geglu_reference`; h is contiguous."""
    m, n = h.shape[0], h.shape[1] // 2
    scale, peaks = (h.new_empty(m, numbers, dtype=torch.float32) for numbers in (1, 3))
    results = h.new_empty(m, n, dtype=VALUE), scale, peaks
    yield results
    if can_launch(h.device):
        from altup.kernels.fp8 import triton as kernels

        kernels.geglu(*results, h)
    else:
        _fill(results, reference.geglu_reference(h))


@operator("altup::fp8_geglu_scales")
def geglu_scales_op(rows: Tensor, columns: Tensor, peaks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """As `geglu_scales_reference`, in one launch; all are contiguous."""
    results = peaks.new_empty(()), peaks.new_empty(())
    yield results
    if can_launch(peaks.device):
        from altup.kernels.fp8 import triton as kernels

        kernels.geglu_scales(*results, rows, columns, peaks)
    else:
        _fill(results, reference.geglu_scales_reference(rows, columns, peaks))


@operator("altup::fp8_geglu_backward")
def geglu_backward_op(
    grad: Tensor, h: Tensor, hidden_scale: Tensor, grad_scale: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `geglu_backward_reference`; grad and h are contiguous."""
    m, n = grad.shape
    results = (
        grad.new_empty(m, 2 * n, dtype=GRADIENT),
        grad.new_empty(2 * n, m, dtype=GRADIENT),
        grad.new_empty(n, m, dtype=VALUE),
    )
    yield results
    if can_launch(h.device):
        from altup.kernels.fp8 import triton as kernels

        kernels.geglu_backward(*results, grad, h, hidden_scale, grad_scale)
    else:
        _fill(results, reference.geglu_backward_reference(grad, h, hidden_scale, grad_scale))


def _fill(results: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for result, value in zip(results, values, strict=True):
        result.copy_(value)
