"""The fused update as a custom operator of PyTorch: opaque to `torch.compile`, with its gradient registered.

A state comes as a list of K blocks or as a list of one stacked tensor, and the new one, like the gradient, is of
the same kind: the kernels write where the result is wanted, and nothing is stacked or split afterwards.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import _get_current_dispatch_mode

from altup.kernels.launch import on_its_device

_GIVEN = "Tensor[] state, Tensor y, Tensor? residual, Tensor P, Tensor g, int active"


def launch(
    state: Sequence[Tensor], y: Tensor, residual: Tensor | None, P: Tensor, g: Tensor, active: int
) -> list[Tensor]:
    """state: K tensors [..., d] or one [K, ..., d]; y, residual: [..., d]; P: [K, K], g: [K], float32."""
    new = like(state)
    kernels().forward(blocks(new, y.dim()), blocks(state, y.dim()), y, residual, P, g, active)
    return new


@functools.cache
def kernels() -> Any:
    """Triton is imported when it is used."""
    return importlib.import_module("altup.kernels.altup_update.triton")


@library.custom_op("altup::update", mutates_args=(), schema=f"({_GIVEN}) -> Tensor[]")
@on_its_device
def update(
    state: Sequence[Tensor], y: Tensor, residual: Tensor | None, P: Tensor, g: Tensor, active: int
) -> list[Tensor]:
    return launch(state, y, residual, P, g, active)


def needs_operator(y: Tensor) -> bool:
    """Whether autograd, a compiler, a mode or a class of tensors has to see the update.

    Otherwise, as when text is generated, the operator's detour takes the host longer than the kernel runs.
    """
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or type(y) is not Tensor
        or _get_current_dispatch_mode() is not None
    )


@library.custom_op("altup::update_backward", mutates_args=(), schema=f"(Tensor[] grads, {_GIVEN}) -> Tensor[]")
@on_its_device
def update_backward(
    grads: Sequence[Tensor],
    state: Sequence[Tensor],
    y: Tensor,
    residual: Tensor | None,
    P: Tensor,
    g: Tensor,
    active: int,
) -> list[Tensor]:
    """The gradients of the state (a list like it), of y, P and g."""
    gradients = _gradients(state, y, P, g)
    *d_state, dy, dP, dg = gradients
    d_blocks, new_grads, old = (blocks(tensors, y.dim()) for tensors in (d_state, grads, state))
    kernels().backward(d_blocks, dy, dP, dg, new_grads, old, y, residual, P, g, active)
    return gradients


@update.register_fake
def _(state: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return like(state)


@update_backward.register_fake
def _(
    grads: Sequence[Tensor], state: Sequence[Tensor], y: Tensor, residual: Any, P: Tensor, g: Tensor, active: int
) -> list[Tensor]:
    return _gradients(state, y, P, g)


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    state, y, residual, P, g, ctx.active = inputs
    ctx.save_for_backward(*state, y, residual, P, g)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple:
    *state, y, residual, P, g = ctx.saved_tensors
    *d_state, dy, dP, dg = update_backward(grads, state, y, residual, P, g, ctx.active)
    return d_state, dy, None if residual is None else dy, dP, dg, None


update.register_autograd(_differentiate, setup_context=_save)


def like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _gradients(state: Sequence[Tensor], y: Tensor, P: Tensor, g: Tensor) -> list[Tensor]:
    return like([*state, y, P, g])


def blocks(state: Sequence[Tensor], dim: int) -> Sequence[Tensor]:
    """The K blocks of either kind of state, which have `dim` dimensions."""
    return state[0].unbind(0) if state[0].dim() > dim else state
