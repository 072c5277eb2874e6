"""Norms, which compute in float32 and keep the dtype that came in, gated feed-forwards, and bare linear maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from altup.kernels.dropout import dropout


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


class LayerNorm(nn.LayerNorm):
    """(x − mean) / √(variance + ε) · weight + bias. Under autocast, torch's own would give back float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class GatedFeedForward(nn.Module):
    """T5 1.1's: wo(dropout(gelu(wi_0·x) ⊙ wi_1·x)), with the tanh form of GELU and no biases."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(width, hidden, bias=False)
        self.wi_1 = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """By fan-in, as T5 does."""
        for linear in (self.wi_0, self.wi_1, self.wo):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def hidden_maps(self) -> tuple[list[nn.Linear], nn.Linear]:
        """Those into the hidden layer, and the one out of it."""
        return [self.wi_0, self.wi_1], self.wo

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x)
        return self.wo(dropout(hidden, self.dropout, self.training))


class SwiGLU(nn.Module):
    """That of today's decoders: down(silu(gate·x) ⊙ up·x), without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def hidden_maps(self) -> tuple[list[nn.Linear], nn.Linear]:
        """Those into the hidden layer, and the one out of it."""
        return [self.gate, self.up], self.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def is_bare(module: nn.Module, bias: bool = False) -> bool:
    """Whether a linear map's weight may be taken for the map: `module(x)` is x·weightᵀ (+ bias) and nothing else
    happens. It is no adapter, its forward is neither hooked nor replaced, and it has a bias exactly if
    `bias`."""
    return type(module) is nn.Linear and (module.bias is not None) == bias and is_unhooked(module)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling a module does what its class does: nothing is hooked to it, nor its forward replaced."""
    return (
        not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and "forward" not in module.__dict__
    )
