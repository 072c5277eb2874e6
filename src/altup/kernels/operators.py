"""Custom operators of PyTorch, each from one Python function, and their gradients by name.

    @operator("altup::scaled")
    def scaled(x: Tensor, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
        out, total = results = torch.empty_like(x), x.new_empty(())
        yield results                                  # all that a compiler needs to know
        kernel[grid](out, total, x, factor)

    @scaled.gradient
    def _(d_out: Tensor, _total: Tensor, *, x: Tensor, factor: float) -> Gradients:
        return {"x": scaled_backward(d_out, x, factor)}

The signature is the operator's schema, and what comes before the `yield` is its fake. A gradient function takes
the results' gradients in order and, by keyword, the inputs and results that the backward pass reads: `d_out` is
the gradient of the result `out`, and `_total` says that `total` has none. A keyword `needs` is the set of inputs
that want a gradient. It returns gradients by the inputs' names; one for a list is a list.

An operator is opaque to `torch.compile`, but calling it costs the host far more than the kernel's launch: it goes
through the dispatcher three times, and through PyTorch's flattening of arguments. So outside of compiled code, and
for ordinary tensors, the function runs directly, in an autograd.Function.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

Gradients = Mapping[str, Any]
LISTS = (Sequence[Tensor], list[Tensor])


def operator(name: str) -> Callable[[Callable[..., Iterator[Any]]], Operator]:
    """Makes an `Operator` of a generator function that changes none of its arguments."""
    return lambda function: Operator(name, function)


class Operator:
    """See above. `registered` is PyTorch's operator; the first argument is a tensor or a list of tensors."""

    def __init__(self, name: str, function: Callable[..., Iterator[Any]]) -> None:
        signature = inspect.signature(function, eval_str=True)
        (made,) = typing.get_args(signature.return_annotation)
        self.name, self.function = name, function
        self.inputs = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        self.is_tuple = typing.get_origin(made) is tuple
        self.made = typing.get_args(made) if self.is_tuple else (made,)
        self.takes_lists = any(kind in LISTS for kind in self.inputs.values())
        self.gives_lists = any(kind in LISTS for kind in self.made)
        self.saved: _Saved | None = None
        self.__doc__ = function.__doc__

        def run(*given: Any) -> Any:
            return self.run(*given)

        run.__signature__ = signature.replace(return_annotation=made)  # type: ignore[attr-defined]
        self.registered = library.custom_op(name, run, mutates_args=())
        self.registered.register_fake(lambda *given: next(function(*given)))

    def run(self, *given: Any) -> Any:
        """On the first tensor's device, because Triton launches on the current one."""
        first = given[0] if isinstance(given[0], Tensor) else given[0][0]
        with torch.cuda.device_of(first):
            steps = self.function(*given)
            made = next(steps)
            next(steps, None)
        return made

    def gradient(self, function: Callable[..., Gradients]) -> Callable[..., Gradients]:
        self.saved = _Saved(self, function)
        self.registered.register_autograd(self.saved.differentiate, setup_context=self.saved.save)
        return function

    def __call__(self, *given: Any) -> Any:
        if not is_unwatched(given[0]):
            return self.registered(*given)
        if not torch.is_grad_enabled():
            return self.run(*given)
        if self.saved is None:  # which PyTorch's own refuses to differentiate
            return self.registered(*given)
        if not self.takes_lists and not self.gives_lists:
            return _Direct.apply(self, None, *given)
        call = _Lengths(given if self.takes_lists else ())
        flat = _Direct.apply(self, call, *(_spread(given) if self.takes_lists else given))
        made = _gather(flat, call.made) if self.gives_lists else flat
        return made if self.is_tuple or not self.gives_lists else made[0]


def is_unwatched(first: Tensor | Sequence[Tensor]) -> bool:
    """Whether an operator's arguments, of which this is the first, are numbers on a device: no compiler reads
    along, and no class of tensors of its own."""
    x = first if isinstance(first, Tensor) else first[0]
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


class _Saved:
    """What an operator's backward pass reads, and how it is kept for it."""

    def __init__(self, operator: Operator, function: Callable[..., Gradients]) -> None:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        grads = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        results = [p.name.removeprefix("d_").removeprefix("_") for p in grads]
        if len(results) != len(operator.made) or not all(p.name.startswith(("d_", "_")) for p in grads):
            raise TypeError(f"{operator.registered}: a gradient takes d_name or _name for each result")
        self.operator, self.function = operator, function
        self.without = [i for i, p in enumerate(grads) if p.name.startswith("_")]
        self.may_be_absent = any(type(None) in typing.get_args(p.annotation) for p in grads)
        self.asks_needs = "needs" in names
        kinds = {**dict(zip(results, operator.made, strict=True)), **operator.inputs}
        order = [*operator.inputs, *results]
        unknown = set(names) - set(order) - {"needs"}
        if unknown:
            raise TypeError(f"{operator.registered}: a gradient reads {sorted(unknown)}; there are {order}")
        # Where each stands among inputs and results.
        at = [(name, order.index(name), kinds[name]) for name in names if name != "needs"]
        self.lists = [(name, i) for name, i, kind in at if kind in LISTS]
        self.tensors = [(name, i) for name, i, kind in at if kind in (Tensor, Tensor | None)]
        self.numbers = [(name, i) for name, i, kind in at if kind not in (*LISTS, Tensor, Tensor | None)]

    def save(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        results = output if self.operator.is_tuple else (output,)
        if self.without:
            ctx.mark_non_differentiable(*_spread([results[i] for i in self.without]))
        if self.may_be_absent:
            ctx.set_materialize_grads(False)
        values = (*inputs, *results)
        tensors = [values[i] for _, i in self.tensors]
        for _, i in self.lists:
            tensors += values[i]
        ctx.save_for_backward(*tensors)
        ctx.kept = {name: values[i] for name, i in self.numbers}
        ctx.lengths = [len(values[i]) for _, i in self.lists]
        if self.asks_needs:
            ctx.kept["needs"] = {
                name for name, value in zip(self.operator.inputs, inputs, strict=True) if _wants(value)
            }

    def differentiate(self, ctx: Any, *grads: Any) -> tuple:
        kept, tensors, start = dict(ctx.kept), ctx.saved_tensors, len(self.tensors)
        for (name, _), tensor in zip(self.tensors, tensors, strict=False):
            kept[name] = tensor
        for (name, _), length in zip(self.lists, ctx.lengths, strict=True):
            kept[name] = list(tensors[start : start + length])
            start += length
        gradients = self.function(*grads, **kept)
        return tuple([gradients.get(name) for name in self.operator.inputs])


def _wants(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(x.requires_grad for x in value)
    return isinstance(value, Tensor) and value.requires_grad


class _Lengths:
    """Of the lists among what is given and what is made (None: no list)."""

    def __init__(self, given: Sequence[Any]) -> None:
        self.given, self.made = _lengths(given), list[int | None]()


def _lengths(values: Sequence[Any]) -> list[int | None]:
    return [len(value) if isinstance(value, (list, tuple)) else None for value in values]


def _spread(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += value
        else:
            flat.append(value)
    return flat


def _gather(flat: Sequence[Any], lengths: Sequence[int | None]) -> tuple:
    rest = iter(flat)
    return tuple([next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths])


class _Direct(torch.autograd.Function):
    """A call with its gradients. Autograd looks at arguments one by one, so lists are spread."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, call: _Lengths | None, *flat: Any) -> Any:
        given = _gather(flat, call.given) if call is not None and operator.takes_lists else flat
        made = operator.run(*given)
        operator.saved.save(ctx, given, made)  # type: ignore[union-attr]
        ctx.operator, ctx.call = operator, call
        if call is None or not operator.gives_lists:
            return made
        values = made if operator.is_tuple else (made,)
        call.made = _lengths(values)
        return tuple(_spread(values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        operator, call = ctx.operator, ctx.call
        if operator.gives_lists:
            grads = _gather(grads, call.made)
        gradients = operator.saved.differentiate(ctx, *grads)
        return None, None, *(_spread(gradients) if operator.takes_lists else gradients)
