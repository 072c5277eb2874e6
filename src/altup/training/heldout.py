"""Loss and accuracy on a fixed set of held-out examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from altup.training.metrics import SUMS, means
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import IGNORED, label_name, share, to_tensors

Evaluate = Callable[[nn.Module, int], dict[str, float]]


class FixedExamples(Protocol):
    """A set of examples, such as `altup.data.batches.HeldOut`."""

    def __len__(self) -> int: ...

    def examples(self, start: int, stop: int) -> dict[str, np.ndarray]: ...


def held_out_loss(
    data: FixedExamples, batch_size: int, process_group: ProcessGroup, autocast: Callable[[], Any]
) -> Evaluate:
    """An `evaluate` callback for the loop: teacher-forced loss and accuracy over all of `data`.

    Every process takes its share of each batch, as in training, so that it works with sharded models.
    """
    first, last = share(batch_size, process_group)

    @torch.no_grad()
    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=process_group.device)
        for begin in range(0, len(data), batch_size):
            batch = to_tensors(full_batch(data, begin + first, begin + last), process_group)
            inputs = {name: t.to(process_group.device, non_blocking=True) for name, t in batch.items()}
            with autocast():
                sums += output_sums(model(**inputs, return_logits=False))
        model.train(was_training)
        return means(dict(zip(SUMS, process_group.all_reduce(sums).tolist(), strict=True)))

    return evaluate


def full_batch(data: FixedExamples, start: int, stop: int) -> dict[str, np.ndarray]:
    """Examples start..stop-1; past the end rows whose labels are all ignored, so that shapes stay the same."""
    arrays = data.examples(start, stop)
    labels = label_name(arrays)
    missing = stop - start - len(arrays[labels])
    if not missing:
        return arrays
    filler = {name: np.repeat(a, missing, axis=0) for name, a in data.examples(0, 1).items()}
    filler[labels] = np.full_like(filler[labels], IGNORED)
    return {name: np.concatenate([a, filler[name]]) for name, a in arrays.items()}


def output_sums(out: Any) -> torch.Tensor:
    """loss_sum, nll_sum, num_correct and num_tokens of a model's output, in float64."""
    return torch.stack([getattr(out, name).detach().double() for name in SUMS])
