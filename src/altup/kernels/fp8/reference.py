"""The definition of products in fp8, in plain PyTorch.

A tensor x becomes q = x / s, rounded to 8 bits, with one power of two s for the tensor, or for each of its rows:

    e4m3  (3 bits of mantissa, up to 448) for weights and activations,
    e5m2  (2 bits, up to 57344) for gradients, whose sizes differ more.

s is what brings the largest number into the upper two binades of the type: it is made anew for every tensor, so
there is no state. A product of two such matrices is that of the rounded numbers, added up in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

VALUE, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
EXPONENT = 0x7F800000  # the bits of a float32's exponent
SMALLEST_SCALE = 2.0**-100
CHUNK, MOST_PARTS = 8192, 512  # a tensor's parts, of which the largest numbers are found first
GELU_SLOPE = 1.13  # the tanh form of GELU is never steeper
SLACK = 2.0  # of a bound: rounding to 8 bits lengthens vectors by less


def parts_of(numel: int, tensors: int = 1) -> int:
    """Into how many parts each of several tensors is cut to find their largest number."""
    return min(max(1, MOST_PARTS // tensors), max(1, -(-numel // CHUNK)))


def power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two above `largest` / (what `dtype` can hold), float32."""
    ratio = largest.float() / torch.finfo(dtype).max
    floor = (ratio.view(torch.int32) & EXPONENT).view(torch.float32)
    return (2 * floor).clamp(min=SMALLEST_SCALE)


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in 8 bits, to the nearest; what is too large becomes the largest, NaN stays NaN."""
    most = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-most, most).to(dtype)


def product_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """a·bᵀ of quantized matrices [m, k] and [n, k]; scales are numbers, or [m, 1] and [1, n]."""
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float().t() * scale_a * scale_b).to(dtype)


def geglu_reference(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden = gelu(h₀) ⊙ h₁ of h = [h₀ h₁] [m, 2n], quantized by rows: q [m, n], scales [m, 1]; and of each row
    the largest |gelu(h₀)|, |h₁| and |hidden|, [m, 3]."""
    h0, h1 = h.float().chunk(2, dim=-1)
    gelu = F.gelu(h0, approximate="tanh")
    hidden = gelu * h1
    peaks = torch.stack([part.abs().amax(-1) for part in (gelu, h1, hidden)], dim=-1)
    scale = power_of_two(peaks[:, 2:], VALUE)
    return quantize_reference(hidden, scale, VALUE), scale, peaks


def geglu_scales_reference(rows: Tensor, columns: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of hidden and of h's gradient, before that is known, from the lengths of dy's rows [m] and of wo's
    columns [n], and `geglu_reference`'s peaks.

    No element of dy·wo is larger than the longest row times the longest column, and the factors of GELU's
    derivative are no larger than the largest numbers of the forward pass.
    """
    gelu, h1, largest = peaks.amax(0).unbind()
    bound = SLACK * rows.amax() * columns.amax() * torch.maximum(gelu, GELU_SLOPE * h1)
    return power_of_two(largest, VALUE), power_of_two(bound, GRADIENT)


def geglu_backward_reference(
    grad: Tensor, h: Tensor, hidden_scale: Tensor, grad_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of hidden [m, n]: that of h, quantized, as [m, 2n] and as [2n, m]; and hiddenᵀ [n, m]."""
    h0, h1, grad = *h.float().chunk(2, dim=-1), grad.float()
    gelu = F.gelu(h0, approximate="tanh")
    d_h0 = torch.ops.aten.gelu_backward(grad * h1, h0, approximate="tanh")
    q = quantize_reference(torch.cat([d_h0, grad * gelu], dim=-1), grad_scale, GRADIENT)
    hidden = quantize_reference(gelu * h1, hidden_scale, VALUE)
    return q, q.t().contiguous(), hidden.t().contiguous()
