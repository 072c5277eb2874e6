"""Activations that the backward pass makes again instead of keeping them: those that one cheap pass makes from
others that are kept anyway, such as a norm's output. A layer of E2B keeps a quarter less.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_current = threading.local()


class Remade:
    """How a tensor is made again. It is kept as long as others will ask for it in the same backward pass."""

    def __init__(self, tensor: Tensor, make: Callable[..., Tensor], inputs: list[Any]) -> None:
        self.make, self.inputs = make, inputs
        self.size, self.dtype = tensor.numel(), tensor.dtype
        self.uses = 0
        self.value: Tensor | None = None

    def look(self) -> Tensor:
        if self.value is not None:
            return self.value
        with torch.no_grad():
            return self.make(*(one.look() if isinstance(one, Remade) else one for one in self.inputs))

    def take(self) -> Tensor:
        made = self.look()
        self.uses -= 1
        self.value = made if self.uses > 0 else None
        return made


class Remaking(torch.autograd.graph.saved_tensors_hooks):
    """Within it, what `remake` was told of is not kept. It is one layer's forward pass."""

    def __init__(self) -> None:
        super().__init__(self._pack, self._unpack)
        self._known: dict[int, Remade] = {}  # by address, which is theirs as long as they live
        self._alive: list[Tensor] = []

    def __enter__(self) -> None:
        super().__enter__()
        _current.remaking = self

    def __exit__(self, *given: Any) -> None:
        _current.remaking = None
        self._known, self._alive = {}, []
        super().__exit__(*given)

    def add(self, tensor: Tensor, make: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        if tensor.numel() and tensor.is_contiguous():
            known = [self._known.get(one.data_ptr(), one.detach()) for one in inputs]
            self._known[tensor.data_ptr()] = Remade(tensor, make, known)
            self._alive.append(tensor)

    def _pack(self, tensor: Tensor) -> Any:
        remade = self._known.get(tensor.data_ptr())
        if remade is None or (tensor.numel(), tensor.dtype) != (remade.size, remade.dtype):
            return tensor
        if not tensor.is_contiguous():
            return tensor
        remade.uses += 1
        return remade, tensor.shape

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        remade, shape = packed
        return remade.take().view(shape)


def can_remake(device: torch.device) -> bool:
    """Not where the compiler decides what is kept, where others hook what is kept (gradient checkpointing,
    offloading), or where autocast, which is over by then, rounds."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device.type)
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


def remake(tensor: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`tensor`, which is `make(*inputs)` and, within a `Remaking`, is made again instead of kept."""
    if (
        not torch.compiler.is_compiling()
        and getattr(_current, "remaking", None) is not None
        and tensor.requires_grad
    ):
        _current.remaking.add(tensor, make, inputs)
    return tensor
