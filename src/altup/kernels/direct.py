"""Custom operators called without PyTorch's dispatcher, where nobody but autograd looks.

An operator of `torch.library` goes through the dispatcher several times, checks what it returns, and copies
structures about: some hundred microseconds on the host, longer than most kernels run. In an ordinary call its own
functions are enough: what computes it, what it keeps, and how it is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PLAIN = (Tensor, nn.Parameter)
DIRECT = False  # not until a GPU has seen it


def call(op: Any, *args: Any) -> Any:
    """`op(*args)` for an operator made by `torch.library.custom_op`; it takes tensors, lists of them, numbers."""
    if not DIRECT or torch.compiler.is_compiling():
        return op(*args)
    leaves: list[Any] = []
    for arg in args:
        leaves.extend(arg) if isinstance(arg, list | tuple) else leaves.append(arg)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(type(tensor) in PLAIN for tensor in tensors):
        return op(*args)
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return op(*args)
    if op._backward_fn is None or not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        with torch.no_grad():
            return op._init_fn(*args)
    shape: list[Any] = []
    made = _Direct.apply(op, [len(arg) if isinstance(arg, list | tuple) else None for arg in args], shape, *leaves)
    found = _folded(made, shape)
    return found[0] if len(found) == 1 else tuple(found)


class _Direct(torch.autograd.Function):
    """Lists come and go one by one: `sizes` has the length of each argument that is one, None for others, and
    `shape` gets the same of what is returned."""

    @staticmethod
    def forward(ctx: Any, op: Any, sizes: list[Any], shape: list[Any], *leaves: Any) -> tuple:
        args = tuple(_folded(leaves, sizes))
        made = op._init_fn(*args)
        made = made if isinstance(made, tuple) else (made,)
        op._setup_context_fn(ctx, args, made if len(made) > 1 else made[0])
        ctx.op, ctx.sizes, ctx.shape = op, sizes, shape
        shape.extend(len(part) if isinstance(part, list | tuple) else None for part in made)
        outputs = tuple(_flat(made))
        # Zeros for what nobody used are made only where there could have been a gradient.
        ctx.set_materialize_grads(False)
        numbers = {id(tensor) for tensor in getattr(ctx, "non_differentiable", None) or ()}
        ctx.like = [None if id(t) in numbers else (t.shape, t.dtype, t.device) for t in outputs]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        filled = [
            torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None and like is not None else grad
            for grad, like in zip(grads, ctx.like, strict=True)
        ]
        found = ctx.op._backward_fn(ctx, *_folded(filled, ctx.shape))
        return None, None, None, *_flat(found, ctx.sizes)


def _folded(leaves: Any, sizes: list[Any]) -> list[Any]:
    rest = iter(leaves)
    return [next(rest) if size is None else [next(rest) for _ in range(size)] for size in sizes]


def _flat(parts: Any, sizes: list[Any] | None = None) -> list[Any]:
    """One by one; where `sizes` says that a part would be a list, None stands for each of its tensors."""
    leaves: list[Any] = []
    for part, size in zip(parts, sizes or [None] * len(parts), strict=True):
        if isinstance(part, list | tuple):
            leaves.extend(part)
        else:
            leaves.extend([part] * (1 if size is None else size))
    return leaves
