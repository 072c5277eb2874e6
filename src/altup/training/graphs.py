"""Forward and backward as CUDA graphs: recorded once for each shape of batch, then replayed.

A compiled layer takes the host about as long to launch as a GPU to run, so without this a fast model waits for its
launches. A graph keeps its own inputs, outputs and gradients in places that never move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Run = Callable[[dict[str, Tensor], Tensor], Tensor]

WARM_UPS = 2  # runs before a recording, in which code is compiled and libraries choose their algorithms


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    scale: Tensor
    result: Tensor
    gradients: list[Tensor | None]


class Graphs:
    """Runs `run(inputs, scale)`, a forward and backward pass over `model` that gives a tensor, as recorded graphs.

    After a call `p.grad` of every parameter holds this pass's gradient, or with `add=True` that added to what the
    last call of the same shapes left there. Gradients must not be replaced in between.
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._run = run
        self._recorded: dict[tuple, Recorded] = {}
        self._pool: Any = None  # memory that the graphs share, since they never run at once

    def __call__(self, inputs: dict[str, Tensor], scale: Tensor, add: bool = False) -> Tensor:
        key = (add, *((name, tensor.shape, tensor.dtype) for name, tensor in sorted(inputs.items())))
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs, scale, add)
        recorded = self._recorded[key]
        for name, tensor in inputs.items():
            recorded.inputs[name].copy_(tensor, non_blocking=True)
        recorded.scale.copy_(scale)
        recorded.graph.replay()
        for parameter, gradient in zip(self._parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        return recorded.result

    def _record(self, inputs: dict[str, Tensor], scale: Tensor, add: bool) -> Recorded:
        device = scale.device
        inputs = {name: tensor.to(device, copy=True) for name, tensor in inputs.items()}
        scale = scale.clone()
        before = [p.grad for p in self._parameters]
        random = torch.cuda.get_rng_state(device)  # which the runs below use up
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._set_gradients(None)
                self._run(inputs, scale)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._set_gradients(before if add else None)
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because meanwhile another thread may prepare the next batch.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._run(inputs, scale)
        self._pool = graph.pool()
        torch.cuda.set_rng_state(random, device)
        return Recorded(graph, inputs, scale, result, [p.grad for p in self._parameters])

    def _set_gradients(self, gradients: list[Tensor | None] | None) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad = None if gradients is None else gradients[i]
