"""The definition of manifold-constrained hyper-connections (mHC, Xie and others 2026), as DeepSeek-V4 has them.

A token's state is K blocks x, [K, d]. At a site, a layer or a part of one, its coefficients come from the state:

    u = scale ∘ (W·x / rms(x)) + base        W: [2K + K², K·d], and rms over all K·d numbers
    a = sigmoid(u_a) + ε,    b = 2·sigmoid(u_b),    A = Sinkhorn(softmax of the rows of u_A + ε)ᵀ
    x ← A·x + b ⊗ f(a·x)

Sinkhorn divides by the sums of columns, then alternately of rows and columns, which makes A almost doubly
stochastic. Everything but the state is float32, or float64 for a state in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Maps(NamedTuple):
    """What makes a site's coefficients: W [2K + K², K·d], base [2K + K²] and scale [3] (of a, b and A), the ε of
    the norm and of Sinkhorn's sums, and Sinkhorn's rounds."""

    weight: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    rounds: int


def coefficients_reference(x: Tensor, maps: Maps) -> tuple[Tensor, Tensor, Tensor]:
    """a: [..., K], b: [..., K] and A: [..., K, K] of x: [..., K, d]."""
    K = x.shape[-2]
    wide = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + maps.norm_eps)
    u = F.linear(normed, maps.weight.to(wide.dtype)) * scales(maps.scale, K) + maps.base
    of_a, of_b, of_A = u.split([K, K, K * K], dim=-1)
    mix = sinkhorn_reference(of_A.unflatten(-1, (K, K)), maps.eps, maps.rounds)
    return torch.sigmoid(of_a) + maps.eps, 2 * torch.sigmoid(of_b), mix.transpose(-1, -2)


def scales(scale: Tensor, K: int) -> Tensor:
    """Of every number: [2K + K²]."""
    return torch.cat([s.expand(n) for s, n in zip(scale.unbind(), (K, K, K * K), strict=True)])


def sinkhorn_reference(u: Tensor, eps: float, rounds: int) -> Tensor:
    """[..., K, K] → almost doubly stochastic."""
    mix = torch.softmax(u, dim=-1) + eps
    mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    return mix


def read_reference(x: Tensor, a: Tensor) -> Tensor:
    """a·x: [..., K, d] → [..., d]."""
    return (a.unsqueeze(-1) * x).sum(dim=-2).to(x.dtype)


def write_reference(x: Tensor, y: Tensor, b: Tensor, A: Tensor) -> Tensor:
    """A·x + b ⊗ y: [..., K, d]."""
    return (A @ x.to(A.dtype) + b.unsqueeze(-1) * y.unsqueeze(-2)).to(x.dtype)
