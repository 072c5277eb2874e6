"""Custom operators of PyTorch, and the same functions called without PyTorch's dispatcher.

An operator is opaque to `torch.compile`, but a call of it costs the host far more than what it does there: it goes
through the dispatcher, and through PyTorch's own flattening of arguments, three times. So where nobody looks at
operators the function runs directly, in an autograd.Function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from altup.kernels.launch import on_its_device


class Operator:
    """A function that changes none of its arguments, and the custom operator that PyTorch makes of it
    (`registered`). It takes tensors, lists of tensors, numbers and None, a tensor or list first, and gives a
    tensor, or a tuple of tensors and lists.
    """

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        self.run = on_its_device(function)
        self.registered = library.custom_op(name, self.run, mutates_args=(), schema=schema)
        self.register_fake = self.registered.register_fake
        self.save: Callable[..., None] | None = None
        self.differentiate: Callable[..., tuple] | None = None

    def register_autograd(
        self, differentiate: Callable[..., tuple], *, setup_context: Callable[..., None]
    ) -> None:
        self.save, self.differentiate = setup_context, differentiate
        self.registered.register_autograd(differentiate, setup_context=setup_context)

    def __call__(self, *given: Any) -> Any:
        if not is_unwatched(given[0]):
            return self.registered(*given)
        if not torch.is_grad_enabled():
            return self.run(*given)
        if self.differentiate is None:  # which PyTorch's own refuses to differentiate
            return self.registered(*given)
        call = _Call(self, given)
        made = call.gather(_Direct.apply(call, *_spread(given)), call.made)
        return made if call.is_tuple else made[0]


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Makes an `Operator` of a function."""
    return lambda function: Operator(name, schema, function)


def is_unwatched(first: Tensor | Sequence[Tensor]) -> bool:
    """Whether an operator's arguments, of which this is the first, are numbers on a device: no compiler reads
    along, and no class of tensors of its own."""
    x = first if isinstance(first, Tensor) else first[0]
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


class _Call:
    """One call: the lengths of the lists among what is given and what is made (None: no list)."""

    def __init__(self, operator: Operator, given: Sequence[Any]) -> None:
        self.operator, self.given = operator, _lengths(given)
        self.made: list[int | None] = []
        self.is_tuple = True

    def gather(self, flat: Iterable[Any], lengths: Sequence[int | None]) -> tuple:
        left = iter(flat)
        return tuple([next(left) if n is None else [next(left) for _ in range(n)] for n in lengths])


def _lengths(values: Iterable[Any]) -> list[int | None]:
    return [len(value) if isinstance(value, (list, tuple)) else None for value in values]


def _spread(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


class _Direct(torch.autograd.Function):
    """A call with its gradients. Autograd looks at arguments one by one, so lists are spread."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *flat: Any) -> tuple:
        operator, given = call.operator, call.gather(flat, call.given)
        made = operator.run(*given)
        operator.save(ctx, given, made)  # type: ignore[misc]
        ctx.call = call
        call.is_tuple = isinstance(made, tuple)
        values = made if call.is_tuple else (made,)
        call.made = _lengths(values)
        return tuple(_spread(values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        call = ctx.call
        return None, *_spread(call.operator.differentiate(ctx, *call.gather(grads, call.made)))
