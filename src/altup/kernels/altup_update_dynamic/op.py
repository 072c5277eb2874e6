"""The fused mixture of blocks as a custom operator of PyTorch, opaque to `torch.compile`.

A state comes as a list of K blocks or as a list of one stacked tensor, and the new one, like the gradient, is of
the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, library

from altup.kernels.altup_update.op import blocks, like
from altup.kernels.launch import on_its_device

_GIVEN = "Tensor[] state, Tensor? y, Tensor M, Tensor? g"


@library.custom_op("altup::mix", mutates_args=(), schema=f"({_GIVEN}) -> Tensor[]")
@on_its_device
def mix(state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None) -> list[Tensor]:
    """state: K tensors [..., d] or one [K, ..., d]; y: [..., d]; M: [..., K, K], g: [..., K], float32.

    y and g are given both or not at all.
    """
    from altup.kernels.altup_update_dynamic import triton as kernels

    new = like(state)
    kernels.forward(blocks(new, M.dim() - 1), blocks(state, M.dim() - 1), y, M, g)
    return new


@library.custom_op("altup::mix_backward", mutates_args=(), schema=f"(Tensor[] grads, {_GIVEN}) -> Tensor[]")
@on_its_device
def mix_backward(
    grads: Sequence[Tensor], state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None
) -> list[Tensor]:
    """The gradients of the state (a list like it), of M and, where given, of y and g."""
    from altup.kernels.altup_update_dynamic import triton as kernels

    gradients = _gradients(state, y, M, g)
    d_state, dM, dy, dg = _apart(gradients, state)
    d_blocks, new_grads, old = (blocks(tensors, M.dim() - 1) for tensors in (d_state, grads, state))
    kernels.backward(d_blocks, dy, dM, dg, new_grads, old, y, M, g)
    return gradients


@mix.register_fake
def _(state: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return like(state)


@mix_backward.register_fake
def _(
    grads: Sequence[Tensor], state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None
) -> list[Tensor]:
    return _gradients(state, y, M, g)


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    state, y, M, g = inputs
    ctx.save_for_backward(*state, y, M, g)


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple:
    *state, y, M, g = ctx.saved_tensors
    d_state, dM, dy, dg = _apart(mix_backward(grads, state, y, M, g), state)
    return d_state, dy, dM, dg


mix.register_autograd(_differentiate, setup_context=_save)


def _gradients(state: Sequence[Tensor], y: Tensor | None, M: Tensor, g: Tensor | None) -> list[Tensor]:
    return like([*state, M, *(tensor for tensor in (y, g) if tensor is not None)])


def _apart(
    gradients: list[Tensor], state: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor | None, Tensor | None]:
    """Those of the state, M, y and g."""
    d_state, (dM, *others) = gradients[: len(state)], gradients[len(state) :]
    dy, dg = others or (None, None)
    return d_state, dM, dy, dg
