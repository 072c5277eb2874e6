"""Norms, which compute in float32 and keep the dtype that came in, gated feed-forwards, and looking words up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.kernels.dropout import dropout
from altup.kernels.embedding import embedding
from altup.kernels.fp8 import fits_fp8, fp8_feed_forward
from altup.kernels.gated import gated
from altup.nn.linear import (
    Bound,
    Fp8Maps,
    Rounding,
    apply_linears,
    is_unhooked,
    joined_linear,
    multiplies_in_fp8,
    rounding_options,
)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight over the last dimension, computed in float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        launched = x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if launched and x.dtype == self.weight.dtype:  # one kernel for eight
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)

    def bound(self) -> Tensor:
        """√width · max |weight|, which no number of the output exceeds."""
        return self.weight.detach().abs().amax() * self.weight.shape[0] ** 0.5


def bound_of(norm: nn.Module) -> Bound | None:
    """An upper bound of a norm's absolute outputs; unknown where an adapter has taken its place."""
    return norm.bound if isinstance(norm, RMSNorm) else None


def is_plain_norm(norm: nn.Module) -> TypeGuard[RMSNorm]:
    """Whether its weight and ε may be taken for the norm: it is no adapter, and nothing is hooked to it."""
    return type(norm) is RMSNorm and is_unhooked(norm)


class LayerNorm(nn.LayerNorm):
    """(x − mean) / √(variance + ε) · weight + bias. Under autocast, torch's own would give back float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class GatedFeedForward(Fp8Maps):
    """T5 1.1's: wo(dropout(gelu(wi_0·x) ⊙ wi_1·x)), with the tanh form of GELU and no biases."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, per_sequence: bool = False) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(width, hidden, bias=False)
        self.wi_1 = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)
        self.dropout = dropout
        self.per_sequence = per_sequence
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """By fan-in, as T5 does."""
        for linear in (self.wi_0, self.wi_1, self.wo):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def hidden_maps(self) -> tuple[list[nn.Linear], nn.Linear]:
        """Those into the hidden layer, and the one out of it."""
        return [self.wi_0, self.wi_1], self.wo

    def maps_of_one_input(self) -> dict[str, Sequence[nn.Linear]]:
        return {"in": (self.wi_0, self.wi_1), "out": (self.wo,)}

    def takes_fp8(self, x: Tensor) -> bool:
        wanted = self.in_fp8("feed_forward") and self.fused_fp8 and not self.dropout
        return wanted and fits_fp8(x, self.wi_0.weight, self.wi_1.weight, self.wo.weight)

    def forward(self, x: Tensor, rounding: Rounding = None) -> Tensor:
        if self.takes_fp8(x):
            weights = self.wi_0.weight, self.wi_1.weight, self.wo.weight
            into, out = self.rounded_maps("in"), self.rounded_maps("out")
            return fp8_feed_forward(x, *weights, rounded_wi=into, rounded_wo=out, **rounding_options(rounding))
        if self.joins("feed_forward", x):
            joined = joined_linear(x, (self.wi_0, self.wi_1))
            hidden = gated(joined, "gelu", self.dropout, self.training, per_sequence=self.per_sequence)
            return self.wo(hidden)
        fp8 = self.in_fp8("feed_forward")
        gate, linear = apply_linears(x, (self.wi_0, self.wi_1), fp8, rounding, rounded=self.rounded_maps("in"))
        hidden = F.gelu(gate, approximate="tanh") * linear
        hidden = dropout(hidden, self.dropout, self.training, per_sequence=self.per_sequence)
        return apply_linears(hidden, (self.wo,), fp8, rounded=self.rounded_maps("out"))[0]


class SwiGLU(Fp8Maps):
    """That of today's decoders: down(silu(gate·x) ⊙ up·x), without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def hidden_maps(self) -> tuple[list[nn.Linear], nn.Linear]:
        """Those into the hidden layer, and the one out of it."""
        return [self.gate, self.up], self.down

    def maps_of_one_input(self) -> dict[str, Sequence[nn.Linear]]:
        return {"in": (self.gate, self.up), "out": (self.down,)}

    def takes_fp8(self, x: Tensor) -> bool:
        return self.in_fp8("feed_forward") and multiplies_in_fp8(x, (self.gate, self.up))

    def forward(self, x: Tensor, rounding: Rounding = None) -> Tensor:
        fp8, into = self.in_fp8("feed_forward"), (self.gate, self.up)
        if self.joins("feed_forward", x):
            return self.down(gated(joined_linear(x, into), "silu"))
        gate, linear = apply_linears(x, into, fp8, rounding, rounded=self.rounded_maps("in"))
        return apply_linears(F.silu(gate) * linear, (self.down,), fp8, rounded=self.rounded_maps("out"))[0]


def embed(table: nn.Module, ids: Tensor, rounds: bool = False) -> Tensor:
    """table(ids), by `altup.kernels.embedding` where the table is nothing but its weight: no adapter, not hooked,
    not sharded. `rounds`: in autocast's dtype then, for a caller that would round it anyway."""
    if type(table) is not nn.Embedding or not is_unhooked(table) or type(table.weight) is not nn.Parameter:
        return table(ids)
    plain = table.padding_idx is None and table.max_norm is None and not (table.sparse or table.scale_grad_by_freq)
    if not plain:
        return table(ids)
    kind = ids.device.type
    rounds = rounds and ids.is_cuda and torch.is_autocast_enabled(kind)
    return embedding(ids, table.weight, dtype=torch.get_autocast_dtype(kind) if rounds else None)
