"""A training step as CUDA graphs: recorded once for each shape of batch, then replayed.

A compiled layer takes the host about as long to launch as a GPU to run, and an optimizer consists of thousands of
small operations, so without this a fast model waits for its launches. A graph keeps its own inputs, outputs and
gradients in places that never move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from altup.kernels.cuda_graph import Replay, record, warm_up
from altup.training.flat_gradients import FlatGradients

Run = Callable[[dict[str, Tensor], Tensor], Tensor]
Update = Callable[[Tensor], tuple[Tensor, ...]]


class Recorded(NamedTuple):
    """One pass and, of the pass that begins a step, the update that may follow."""

    replay: Replay
    inputs: dict[str, Tensor]
    scale: Tensor
    gradients: list[Tensor | None]
    update: Replay | None = None


class Graphs:
    """Runs `run(inputs, scale)`, a forward and backward pass over `model` that gives a tensor, as recorded graphs.

    After a call `p.grad` of every parameter holds this pass's gradient, or with `add=True` that added to what the
    last call of the same shapes left there. Gradients must not be replaced in between. With `keep=False` nothing
    but `update` may follow, and `p.grad` is None: graphs of other shapes use the same memory for their gradients.

    With `flat`, gradients go there instead, `p.grad` is None, and `update` takes them from there; graphs of any
    shape may follow each other in a step.

    All graphs share one pool of memory, as they never run at once. A small one finds room in what a large one has
    used, but not the other way round, so a graph larger than all before it replaces them: they are recorded again,
    when they are wanted, in its memory.

    `update(frozen)` uses the gradients and gives tensors; where the bool tensor `frozen` is true it must leave
    everything as it is, so that it can be tried before it is recorded.
    """

    def __init__(
        self, model: nn.Module, run: Run, update: Update | None = None, flat: FlatGradients | None = None
    ) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._run = run
        self._update = update
        self._flat = flat
        self._recorded: dict[tuple, Recorded] = {}
        self._latest: Recorded | None = None  # the pass that began the step
        self._pool: Any = None
        self._largest = 0  # elements of inputs

    def __call__(self, inputs: dict[str, Tensor], scale: Tensor, add: bool = False, keep: bool = True) -> Tensor:
        key = (add, keep, *((name, tensor.shape, tensor.dtype) for name, tensor in sorted(inputs.items())))
        if key not in self._recorded:
            if not add:  # in the middle of a step the graph that began it is needed
                self._make_room(sum(tensor.numel() for tensor in inputs.values()))
            self._recorded[key] = self._record(inputs, scale, add, keep)
        recorded = self._recorded[key]
        if not add:
            self._latest = recorded
        for name, tensor in inputs.items():
            recorded.inputs[name].copy_(tensor, non_blocking=True)
        recorded.scale.copy_(scale)
        result = recorded.replay()
        self._set_gradients(recorded.gradients)
        return result

    def update(self) -> tuple[Tensor, ...]:
        """Replay the update with the gradients of the step's passes."""
        assert self._latest is not None
        assert self._latest.update is not None
        return self._latest.update()

    def _make_room(self, size: int) -> None:
        """Free all graphs if the next one is the largest."""
        if self._recorded and size > self._largest:
            self._recorded.clear()
            self._latest = self._pool = None
            torch.cuda.empty_cache()  # or their memory would not be freed
        self._largest = max(self._largest, size)

    def _record(self, inputs: dict[str, Tensor], scale: Tensor, add: bool, keep: bool) -> Recorded:
        device = scale.device
        inputs = {name: tensor.to(device, copy=True) for name, tensor in inputs.items()}
        scale = scale.clone()
        before = [p.grad for p in self._parameters]
        random = torch.cuda.get_rng_state(device)  # which the runs below use up

        def run() -> Tensor:
            result = self._run(inputs, scale)
            if self._flat is not None:
                self._flat.take(add)
            return result

        def run_fresh() -> None:
            self._set_gradients(None)
            self._run(inputs, scale)

        warm_up(run_fresh, device)
        self._set_gradients(before if add else None)
        replay = record(run, self._pool)
        self._pool = replay.graph.pool()
        recorded = Recorded(replay, inputs, scale, [p.grad for p in self._parameters])
        if self._update is not None and not add:
            # These gradients hold no results yet, so the update may overwrite them.
            update, frozen = self._update, torch.ones((), dtype=torch.bool, device=device)
            if self._flat is not None:
                self._flat.give()
            warm_up(lambda: update(frozen), device)
            recorded = recorded._replace(update=record(lambda: update(frozen), self._pool))
            frozen.fill_(False)
        torch.cuda.set_rng_state(random, device)
        return recorded if keep else recorded._replace(gradients=[None] * len(self._parameters))

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[i]
