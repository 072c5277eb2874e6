"""A small feed-forward in fp8 beside float64, on the device that is to train.

A compiler may be wrong about a kernel: ptxas 12.8 was (`four_bytes`).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.kernels.fp8 import fp8_feed_forward, fp8_linear

ALLOWED = 0.2  # rounding alone gives up to 0.1


@functools.cache
def products_error(device: torch.device) -> float:
    """How far the gradients of linear maps in fp8 are off: the worst relative error. Right ones are off by less
    than ALLOWED."""
    x, wi_0, wi_1, _, grad = _problem(device)
    with torch.enable_grad():
        got = torch.autograd.grad(fp8_linear(x, [wi_0, wi_1]), [x, wi_0, wi_1], [grad, grad.flip(0)])
        exact = [t.detach().double().requires_grad_() for t in (x, wi_0, wi_1)]
        out = [exact[0] @ weight.t() for weight in exact[1:]]
        want = torch.autograd.grad(out, exact, [grad.double(), grad.flip(0).double()])
    return _worst(got, want)


@functools.cache
def fused_error(device: torch.device) -> float:
    """The same for the feed-forward, whose kernels are of their own."""
    *inputs, grad = _problem(device)
    with torch.enable_grad():
        out = fp8_feed_forward(inputs[0], inputs[1], inputs[2], inputs[3])
        got = torch.autograd.grad(out, inputs, grad)
        x, wi_0, wi_1, wo = exact = [t.detach().double().requires_grad_() for t in inputs]
        out = (F.gelu(x @ wi_0.t(), approximate="tanh") * (x @ wi_1.t())) @ wo.t()
        want = torch.autograd.grad(out, exact, grad.double())
    return _worst(got, want)


def _problem(device: torch.device) -> list[Tensor]:
    """x, three weights and a gradient, 128 × 128 each, drawn without touching anyone's random numbers."""
    generator = torch.Generator().manual_seed(0)
    x, *weights, grad = (torch.randn(128, 128, generator=generator) for _ in range(5))
    made = [x, *(weight * 128**-0.5 for weight in weights), 1e-5 * grad]
    return [t.to(device, torch.bfloat16).requires_grad_() for t in made[:4]] + [made[4].to(device, torch.bfloat16)]


def _worst(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return max(error if error == error else float("inf") for error in errors)
