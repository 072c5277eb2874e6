"""The definitions of what a decoder's step computes, for one new token of each row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_reference(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """y = x̂·weightᵀ with x̂ = x / √(mean(x²) + ε) · norm, or x itself without a norm.

    Gated, of weight's 2n rows, it is gelu(y₁…n) ⊙ yₙ₊₁…₂ₙ. `residual` is added. x: [rows, k], weight: [n, k].
    """
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * norm
    y = F.linear(x, weight)
    if gated:
        gate, linear = y.chunk(2, dim=-1)
        y = F.gelu(gate, approximate="tanh") * linear
    return y if residual is None else residual + y


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, added: Tensor | None = None) -> Tensor:
    """softmax(q·keysᵀ + added)·values, [rows, heads·d], without T5's missing 1/√d.

    q: [rows, heads·d], keys and values: [rows, heads, tokens, d], added: broadcastable to [rows, heads, tokens].
    """
    rows, heads, _, d = keys.shape
    scores = torch.einsum("bhd,bhtd->bht", q.view(rows, heads, d), keys)
    shares = (scores if added is None else scores + added).softmax(dim=-1)
    return torch.einsum("bht,bhtd->bhd", shares, values).flatten(1)
