"""Loss and accuracy on a fixed set of held-out examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from altup.training.metrics import means
from altup.training.parallel import Processes
from altup.training.prefetch import assemble

if TYPE_CHECKING:
    from altup.data.batches import Batches


Evaluate = Callable[[nn.Module, int], dict[str, float]]


def held_out(
    batches: Batches, number: int, micro_batch: int, mine: Processes, autocast: Callable[[], torch.autocast]
) -> Evaluate:
    """An `evaluate` callback for the loop: teacher-forced loss and accuracy over `number` micro-batches.

    Every process takes its share of each micro-batch, as in training, so that it works with sharded models.
    """

    @torch.no_grad()
    def evaluate(model: nn.Module, step: int) -> dict[str, float]:
        was_training = model.training
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=mine.device)
        for i in range(number):
            batch = assemble(
                batches, i, batch_size=micro_batch, micro_batch=micro_batch, rank=mine.rank, world=mine.world,
                pin=mine.device.type == "cuda",
            ).micro[0]  # fmt: skip
            inputs = {name: t.to(mine.device, non_blocking=True) for name, t in batch.items()}
            with autocast():
                out = model(**inputs, return_logits=False)
            sums += output_sums(out)
        model.train(was_training)
        names = ("loss_sum", "nll_sum", "num_correct", "num_tokens")
        return means(dict(zip(names, mine.add_up(sums).tolist(), strict=True)))

    return evaluate


def output_sums(out: object) -> torch.Tensor:
    """[loss_sum, nll_sum, num_correct, num_tokens] of a model's output, in float64."""
    names = ("loss_sum", "nll_sum", "num_correct", "num_tokens")
    return torch.stack([getattr(out, name).detach().double() for name in names])
