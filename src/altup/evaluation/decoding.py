"""Answers to many texts: sorted by length, so that a batch pads little and ends together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from altup.data.tasks.examples import Tokens
from altup.data.tasks.task import Task
from altup.evaluation.answering import Answering


class Peers(Protocol):
    """The processes that share the work, such as `altup.training.parallel.ProcessGroup`."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor: ...


def decode(
    model: Any,
    answering: Answering,
    texts: Sequence[str] | Tokens,
    *,
    inputs_length: int,
    targets_length: int,
    task: Task | None = None,
    batch_size: int = 128,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    peers: Peers | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The model's answer to every text, in the order of `texts`.

    Inputs are cut at `inputs_length` tokens. Of several processes each decodes every n-th batch, and all get
    everything. `progress(n)` reports that n more texts are done.
    """
    tokens = texts if isinstance(texts, Tokens) else answering.inputs(texts, inputs_length)
    longest_first = np.argsort(-tokens.lengths, kind="stable")  # what does not fit in memory fails at once
    outputs = torch.zeros(len(texts), targets_length, dtype=torch.int64)
    rank, world = (peers.rank, peers.world_size) if peers else (0, 1)
    was_training = model.training
    model.eval()
    # A model compiled for training would be compiled again for every length of a growing answer.
    with torch.compiler.set_stance("force_eager"), torch.inference_mode(), autocast():
        for begin in range(rank * batch_size, len(texts), batch_size * world):
            rows = longest_first[begin : begin + batch_size]
            batch = [tokens[i] for i in rows]
            found = answering.answer(model, batch, task, (inputs_length, targets_length)).cpu()
            outputs[torch.from_numpy(rows), : found.shape[1]] = found
            progress(len(rows))
    model.train(was_training)
    if peers:
        outputs = peers.all_reduce(outputs)
    return [answering.read(row, task) for row in outputs.tolist()]


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Linear maps in `dtype`, for a model that is not trained any more.

    Under autocast each of them rounds its weights in every call, that is in every step of an answer. Rounded
    once they are the same numbers for a quarter of the memory traffic.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
