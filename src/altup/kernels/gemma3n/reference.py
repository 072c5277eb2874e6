"""The definition of Gemma 3n's AltUp, whose coefficients a token makes for itself.

With the router R: [K, d], the norm's scale s: [d] and a token x: [d],

    m(x) = tanh(R·(s ∘ x / rms(x)) / d),    rms(x) = √(mean(x²) + ε)
    predict     x̂ⁱ = xⁱ + Σⱼ Aᵢⱼ·m(xᵃ) xʲ                      A: [K², K], row i·K + j
    correct     x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ),    g = 1 + C·m(y)      C: [K, K]

where y is what the layer computed from x̂ᵃ. Blocks 1..K−1 then get the normed output p of the per-layer input's
branch, which starts at the corrected active block. All sums run in float32, or float64 for float64 states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-5  # mean square of a projected block, below which it is not made larger


class Router(NamedTuple):
    """What makes coefficients from a token: R: [K, d], the norm's scale: [d], and its ε."""

    weight: Tensor
    norm: Tensor
    eps: float


def wide(x: Tensor) -> Tensor:
    """In float32, or as it is if it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """In float32 or wider: scale ∘ x / rms(x)."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * scale.to(x.dtype)


def modalities(x: Tensor, router: Router) -> Tensor:
    """m(x): [..., d] → [..., K]."""
    normed = rms_norm(x, router.norm, router.eps)
    return torch.tanh(F.linear(normed / x.shape[-1], router.weight.to(normed.dtype)))


def predict_reference(x: Sequence[Tensor], router: Router, A: Tensor, active: int) -> list[Tensor]:
    """The K predicted blocks: x, K blocks [..., d]."""
    K = len(x)
    m = modalities(x[active], router)
    P = F.linear(m, A.to(m.dtype)).unflatten(-1, (K, K))
    blocks = [wide(block) for block in x]
    return [(blocks[i] + sum(P[..., i, j, None] * blocks[j] for j in range(K))).to(x[i].dtype) for i in range(K)]


def correction_reference(y: Tensor, router: Router, C: Tensor) -> Tensor:
    """g: [..., d] → [..., K]."""
    m = modalities(y, router)
    return 1 + F.linear(m, C.to(m.dtype))


def corrected_active_reference(
    predicted: Tensor, y: Tensor, g: Tensor, active: int, scale: Tensor | None
) -> Tensor:
    """The corrected active block, times `scale`: [d] where there is one; predicted is x̂ᵃ."""
    old, new = wide(predicted), wide(y)
    corrected = old + g[..., active, None] * (new - old)
    return (corrected if scale is None else corrected * scale).to(y.dtype)


def correct_reference(
    predicted: Sequence[Tensor],
    y: Tensor,
    g: Tensor,
    active: int,
    branch: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The new state [K, ..., d]; the branch p is normed with the scale `norm` and added to all but block 0."""
    innovation = wide(y) - wide(predicted[active])
    new = [wide(block) + g[..., i, None] * innovation for i, block in enumerate(predicted)]
    if branch is not None and norm is not None:
        added = rms_norm(branch, norm, eps)
        new[1:] = [block + added for block in new[1:]]
    return torch.stack(new).to(y.dtype)


def match_reference(h: Tensor, projected: Sequence[Tensor], mean: bool) -> Tensor:
    """Blocks of one magnitude: h and each p times √mean(h²) / √max(mean(p²), smallest), stacked or averaged.

    h, p: [..., d]; before the first layer p are projections of h, behind the last layer those of blocks 1..K−1.
    """
    blocks = [wide(h)]
    square = blocks[0].square().mean(dim=-1, keepdim=True)
    # As a root would, but with the slope 0 at h = 0, where that of a root is not finite.
    target = torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)
    for p in projected:
        block = wide(p)
        size = block.square().mean(dim=-1, keepdim=True).clamp(min=SMALLEST).sqrt()
        blocks.append(block * target / size)
    stacked = torch.stack(blocks)
    return (stacked.mean(dim=0) if mean else stacked).to(h.dtype)


def gated_reference(gate: Tensor, up: Tensor, z: float | None) -> Tensor:
    """gelu(s) ∘ up with s = gate or, given z, what lies above a token's mean and z of its standard deviations."""
    s = wide(gate)
    if z is not None:
        s = F.relu(s - (s.mean(dim=-1, keepdim=True) + z * s.std(dim=-1, keepdim=True, unbiased=False)))
    return (F.gelu(s, approximate="tanh") * wide(up)).to(gate.dtype)


def norm_rotary_reference(x: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads normed and turned by their places. x: [batch, tokens, heads, D]; cos, sin: [batch or 1, tokens, D]."""
    n = rms_norm(x, norm, eps)
    first, second = n.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (n * cos.unsqueeze(2) + turned * sin.unsqueeze(2)).to(x.dtype)


def residual_reference(
    x: Tensor,
    a: Tensor,
    a_norm: Tensor,
    n: Tensor | None,
    r: Tensor | None,
    r_norm: Tensor | None,
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """x + normed a, or with n and r (x + normed a + n + normed r) / √2; and it normed, where there is a `norm`."""
    out = wide(x) + rms_norm(a, a_norm, eps)
    if n is not None and r is not None and r_norm is not None:
        out = (out + (n + rms_norm(r, r_norm, eps))) / math.sqrt(2)
    return out.to(x.dtype), None if norm is None else rms_norm(out, norm, eps).to(x.dtype)
