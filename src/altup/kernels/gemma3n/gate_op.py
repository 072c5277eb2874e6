"""The kernels of Gemma 3n's feed-forward gate as custom operators of PyTorch, alone and with the map behind it.

What the map reads is as wide as the gate and made from gate and up in one pass. With the map it is made again in
the backward pass instead of kept, an eighth of all that a layer of E2B keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.kernels.launch import without_autocast
from altup.kernels.operators import operator


@operator("altup::gemma3n_gate", "(Tensor gate, Tensor up, float? z) -> (Tensor, Tensor)")
def gate(gate: Tensor, up: Tensor, z: float | None) -> tuple[Tensor, Tensor]:
    """gelu(s) ∘ up: [..., d], and each token's mean and standard deviation: [..., 2] (empty without z)."""
    from altup.kernels.gemma3n import gate_kernels as kernels

    out, stats = made = _gated(gate, z)
    kernels.forward(out, stats, gate, up, z)
    return made


def _gated(gate: Tensor, z: float | None) -> tuple[Tensor, Tensor]:
    shape = (0,) if z is None else (*gate.shape[:-1], 2)
    return gate.new_empty(gate.shape), gate.new_empty(shape, dtype=torch.float32)


@gate.register_fake
def _(gate: Tensor, up: Tensor, z: float | None) -> Any:
    return _gated(gate, z)


@operator(
    "altup::gemma3n_gate_backward",
    "(Tensor grad, Tensor stats, Tensor gate, Tensor up, float? z) -> (Tensor, Tensor)",
)
def gate_backward(grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, z: float | None) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    from altup.kernels.gemma3n import gate_kernels as kernels

    d_gate, d_up = gradients = gate.new_empty(gate.shape), up.new_empty(up.shape)
    kernels.backward(d_gate, d_up, None, grad, stats, gate, up, z)
    return gradients


@gate_backward.register_fake
def _(grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, z: float | None) -> Any:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    gate, up, ctx.z = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], gate, up)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple:
    stats, gate, up = ctx.saved_tensors
    return *gate_backward(grad, stats, gate, up, ctx.z), None


gate.register_autograd(_differentiate, setup_context=_save)


@operator("altup::gemma3n_gated_linear", "(Tensor gate, Tensor up, Tensor weight, float? z) -> (Tensor, Tensor)")
def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, z: float | None) -> tuple[Tensor, Tensor]:
    """(gelu(s) ∘ up)·weightᵀ: [..., n], and `gate`'s second; weight: [n, d]."""
    from altup.kernels.gemma3n import gate_kernels as kernels

    hidden, stats = _gated(gate, z)
    kernels.forward(hidden, stats, gate, up, z)
    with without_autocast(gate.device.type):
        return F.linear(hidden, weight), stats


@gated_linear.register_fake
def _(gate: Tensor, up: Tensor, weight: Tensor, z: float | None) -> Any:
    return gate.new_empty(*gate.shape[:-1], len(weight)), _gated(gate, z)[1]


@operator(
    "altup::gemma3n_gated_linear_backward",
    "(Tensor grad, Tensor stats, Tensor gate, Tensor up, Tensor weight, float? z) -> (Tensor, Tensor, Tensor)",
)
def gated_linear_backward(
    grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, weight: Tensor, z: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate, up and weight."""
    from altup.kernels.gemma3n import gate_kernels as kernels

    rows = grad.reshape(-1, grad.shape[-1])
    d_gate, d_up, hidden = gate.new_empty(gate.shape), up.new_empty(up.shape), gate.new_empty(gate.shape)
    with without_autocast(gate.device.type):
        kernels.backward(d_gate, d_up, hidden, rows @ weight, stats, gate, up, z)
        return d_gate, d_up, rows.t() @ hidden.view(-1, hidden.shape[-1])


@gated_linear_backward.register_fake
def _(grad: Tensor, stats: Tensor, gate: Tensor, up: Tensor, weight: Tensor, z: float | None) -> Any:
    return gate.new_empty(gate.shape), up.new_empty(up.shape), weight.new_empty(weight.shape)


def _save_linear(ctx: Any, inputs: tuple, output: tuple) -> None:
    gate, up, weight, ctx.z = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], gate, up, weight)


def _differentiate_linear(ctx: Any, grad: Tensor, *_: Any) -> tuple:
    stats, gate, up, weight = ctx.saved_tensors
    return *gated_linear_backward(grad, stats, gate, up, weight, ctx.z), None


gated_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)
