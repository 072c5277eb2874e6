"""Gradients in flat buffers, which the ranks of a data-parallel run add up in one message each."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from altup.training.parallel import ProcessGroup

ALIGNMENT = 64  # elements between which gradients begin: vector loads of every dtype are aligned


class FlatGradients:
    """One buffer for each dtype, with a place for the gradient of every parameter that is trained.

    Backward passes leave gradients in `p.grad`. `take` moves them into the buffers, `exchange` adds the buffers of
    all ranks up, and `give` makes `p.grad` a view of them for the update. The buffers never move, so that one CUDA
    graph may end with `take` and another begin behind `give`; `exchange` runs between the two.

    A parameter that a rank's passes did not reach has the gradient zero there. The end of the first buffer counts,
    for each parameter, the ranks that reached it: one that none did is left alone by the update, without weight
    decay too (`leave_unreached`), as by a single process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for i, parameter in enumerate(self._parameters):
            places[parameter.device, parameter.dtype].append(i)
        views: dict[int, Tensor] = {}
        self.buffers: list[Tensor] = []
        self._reached: Tensor | None = None
        for (device, dtype), indices in places.items():
            sizes = [-(-self._parameters[i].numel() // ALIGNMENT) * ALIGNMENT for i in indices]
            more = 0 if self.buffers else len(self._parameters)
            buffer = torch.zeros(sum(sizes) + more, dtype=dtype, device=device)
            if more:
                self._reached = buffer[sum(sizes) :]
            for i, start in zip(indices, itertools.accumulate(sizes, initial=0), strict=False):
                views[i] = _view(buffer, start, self._parameters[i])
            self.buffers.append(buffer)
        self._views = [views[i] for i in range(len(self._parameters))]
        self._unreached: list[int] = []  # here, by the pass that began the step
        if any(buffer.is_cuda for buffer in self.buffers):  # load kernels now, and not while a graph is recorded
            torch._foreach_copy_(self._views, self._views)
            torch._foreach_add_(self._views, self._views)

    @torch.no_grad()
    def take(self, add: bool = False) -> None:
        """Move `p.grad` of all parameters into the buffers, or add it to what they hold."""
        places, gradients = [], []
        reached = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None:
                places.append(view)
                gradients.append(parameter.grad)
            elif not add:
                view.zero_()
            parameter.grad = None
        if places:
            (torch._foreach_add_ if add else torch._foreach_copy_)(places, gradients)
        if self._reached is not None:
            self._count(reached, add)

    def _count(self, reached: list[int], add: bool) -> None:
        """Note which parameters a pass has reached."""
        assert self._reached is not None
        if not add:
            self._unreached = sorted(set(range(len(self._parameters))).difference(reached))
            self._reached.fill_(1)
            for i in self._unreached:
                self._reached[i].fill_(0)
        elif self._unreached:
            for i in reached:
                self._reached[i].fill_(1)

    def exchange(self) -> None:
        """The sum over all ranks, in place; the host does not wait for it on a GPU."""
        if dist.is_initialized():
            for buffer in self.buffers:
                dist.all_reduce(buffer)

    @contextlib.contextmanager
    def leave_unreached(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Around an update: parameters that no rank reached, and their state, stay as they are. The host does not
        wait to know them."""
        before = []
        for i in self._unreached:
            parameter = self._parameters[i]
            state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, Tensor)]
            before += [(i, t, t.detach().clone()) for t in (parameter, *state)]
        yield
        with torch.no_grad():
            for i, tensor, old in before:
                assert self._reached is not None
                tensor.copy_(torch.where(self._reached[i].to(tensor.device) > 0, tensor, old))

    def give(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def _view(buffer: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """The place of a gradient, laid out as its parameter is."""
    dense = torch.empty_like(parameter, device="meta")
    return buffer[start : start + parameter.numel()].as_strided(dense.shape, dense.stride())


def share_buffers(model: nn.Module, process_group: ProcessGroup) -> None:
    """Give every rank the buffers of rank 0, as batch norms have them: those that checkpoints hold."""
    for module in model.modules():
        left_out = module._non_persistent_buffers_set
        process_group.share(b for name, b in module._buffers.items() if b is not None and name not in left_out)
