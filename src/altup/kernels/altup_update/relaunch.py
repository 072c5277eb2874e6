"""Launching the update's kernel again, for arrays of a kind that it was compiled for: little work for the host.

Text that is generated waits for the host, in every layer. Triton looks at every argument to find the kernel that
it has compiled, which takes longer than all else. So that kernel is kept here, for arrays that Triton would tell
from no others: contiguous, from multiples of 16 bytes on, and on the current device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor, nn

stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # which PyTorch without CUDA does not have
# By kind of arrays: what launches the kernel, and its block size.
COMPILED: dict[tuple[Any, ...], tuple[Callable[..., None], int]] = {}
MOST_KINDS = 1024
ROOM_LAYERS, ROOM_SIZE = 16, 2**16  # blocks of up to so many numbers get room for so many layers at once


def kind_of(xs: Sequence[Tensor], y: Tensor, residual: Tensor | None, config: Any) -> tuple[Any, ...]:
    return y.numel(), len(xs), config, xs[0].dtype, y.dtype, residual is None, y.get_device()


def addresses_of(arrays: Sequence[Tensor], residual: Tensor | None = None) -> list[int] | None:
    """None if one of them is an array that Triton would tell from others of its kind."""
    device, together, found = torch.cuda.current_device(), 0, []
    for array in arrays if residual is None else (*arrays, residual):
        if not array.is_contiguous() or array.get_device() != device:
            return None
        address = array.data_ptr()
        together |= address
        found.append(address)
    return found if together % 16 == 0 else None


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """`compiled[grid]`, sooner: Triton prepares each launch for profilers' hooks, even where there are none."""
    ordinary = compiled[grid]
    if not triton.__version__.startswith("3.6."):  # what follows is not public
        return ordinary
    there, hooks_at, device = compiled.run, triton.knobs.runtime, torch.cuda.current_device()
    if there.global_scratch_size or there.profile_scratch_size:
        return ordinary
    run = there.launch
    no_memory, no_hooks = (None, None), (None, None, None)
    modes = there.launch_cooperative_grid, there.launch_pdl
    how = (compiled.function, *modes, *no_memory, compiled.packed_metadata, *no_hooks)

    def launch(*given: Any) -> None:
        hooks = hooks_at.launch_enter_hook
        if hooks is not None and hooks.calls:
            ordinary(*given)
        else:
            run(*grid, stream_of(device), *how, *given)

    return launch


class Chain:
    """Updates of one pass, each of the blocks that the one before it has made. What they share is looked at once.

    There is room for several layers' blocks: tensors made together take the host a tenth of what one takes that is
    made between a layer's other work.
    """

    __slots__ = (
        "block",
        "count",
        "device",
        "dtype",
        "first",
        "launch",
        "n",
        "of_y",
        "room",
        "shape",
        "slot",
        "step",
        "stream",
    )

    def __init__(self, kind: tuple[Any, ...], xs: Sequence[Tensor], y: Tensor) -> None:
        self.launch, self.block = COMPILED[kind]
        self.n, self.count, self.device = kind[0], len(xs), y.get_device()
        self.shape, self.dtype, self.of_y = y.shape, xs[0].dtype, y.dtype
        self.step = self.n * self.dtype.itemsize
        self.stream = stream_of(self.device)
        self._make_room(y)

    def _make_room(self, y: Tensor) -> None:
        slots = self.count * (ROOM_LAYERS if self.n <= ROOM_SIZE else 1)
        room = y.new_empty(slots, *self.shape, dtype=self.dtype)
        self.room, self.first, self.slot = room.unbind(0), room.data_ptr(), 0

    def follow(self, addresses: tuple[int, ...], y: Tensor, update: Any, active: int) -> Updated | None:
        """The blocks at `addresses`, updated with a layer's output y and the P and g that `update` holds; None if
        these are of another kind than the first."""
        coefficients, device = update._parameters, self.device
        P, g = coefficients["P"], coefficients["g"]
        at_y, at_P, at_g = y.data_ptr(), P.data_ptr(), g.data_ptr()
        if (
            (at_y | at_P | at_g) & 15
            or y.dtype is not self.of_y
            or y.shape != self.shape
            or not y.is_contiguous()
            or y.get_device() != device
            or P.dtype is not torch.float32
            or g.dtype is not torch.float32
            or not P.is_contiguous()
            or P.get_device() != device
            or g.get_device() != device
            or type(P) is not nn.Parameter  # but of a class that may keep its numbers elsewhere
            or stream_of(device) != self.stream  # to which the room belongs
            or torch.is_grad_enabled()
        ):
            return None
        count, step, slot = self.count, self.step, self.slot
        if slot == len(self.room):
            self._make_room(y)
            slot = 0
        self.slot = slot + count
        at = self.first + slot * step
        new = (at, at + step) if count == 2 else tuple([at + i * step for i in range(count)])
        self.launch(new, addresses, at_y, None, at_P, at_g, active, self.n, count, self.block)
        return self.room[slot : slot + count], (self, new)


# A chain, and the addresses of the blocks that it has made last; and those blocks with it.
Link = tuple[Chain, tuple[int, ...]]
Updated = tuple[Sequence[Tensor], Link]


def begin_chain(xs: Sequence[Tensor], y: Tensor, update: Any, active: int, config: Any) -> Updated | None:
    """The new blocks, with which a chain begins; None where the kernel was not launched for such arrays before,
    or where arrays do not fit."""
    K, shape, P, g = len(xs), y.shape, update.P, update.g
    xs = [x.contiguous() for x in xs]  # of rows that were split, as AltUp's first ones are
    kind = kind_of(xs, y, None, config)
    if kind not in COMPILED or P.shape != (K, K) or g.shape != (K,) or not 0 <= active < K:
        return None
    if any(x.shape != shape or x.dtype != xs[0].dtype for x in xs):
        return None
    addresses = addresses_of((*xs, y))
    return None if addresses is None else Chain(kind, xs, y).follow(tuple(addresses[:K]), y, update, active)
