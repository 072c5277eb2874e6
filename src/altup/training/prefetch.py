"""A step's examples as tensors: each process's share, made ahead so that the device never waits for data."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from altup.data.batches import Batches, read_ahead
from altup.kernels.cross_entropy import IGNORED
from altup.training.parallel import ProcessGroup

# Of packed rows; all else is 0, and no token sees an input of segment 0.
PADDING = {"labels": IGNORED, "shift_labels": IGNORED}


@dataclass
class StepBatch:
    """One process's share of a step: a dict of tensors a micro-batch, how many labels count in them, and how many
    tokens of inputs are not padding."""

    micro: list[dict[str, torch.Tensor]]
    tokens: int
    inputs: int


def label_name(batch: Mapping[str, Any]) -> str:
    """The labels of a batch: `shift_labels` where they are shifted already, else `labels`."""
    return "shift_labels" if "shift_labels" in batch else "labels"


def share(size: int, process_group: ProcessGroup) -> tuple[int, int]:
    """The contiguous positions of a micro-batch of `size` that this process takes."""
    return size * process_group.rank // process_group.world_size, size * (
        process_group.rank + 1
    ) // process_group.world_size


def to_tensors(arrays: dict[str, np.ndarray], process_group: ProcessGroup) -> dict[str, torch.Tensor]:
    """int64 tensors, and float32 of what is not whole; for a GPU in pinned memory, from where a copy need not be
    waited for."""
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64 if a.dtype.kind in "iu" else np.float32))
        for name, a in arrays.items()
    }
    if process_group.device.type != "cuda":
        return tensors
    with torch.cuda.device(process_group.device):  # a new thread uses the first GPU
        return {name: t.pin_memory() for name, t in tensors.items()}


def assemble(batches: Batches, micro_batch: int, process_group: ProcessGroup, step: int) -> StepBatch:
    """This process's share of global step `step`, a pure function of its arguments."""
    first, last = share(micro_batch, process_group)
    arrays = [
        batches.examples(step, begin + first, begin + last) for begin in range(0, batches.batch_size, micro_batch)
    ]
    if process_group.device.type == "cuda":
        arrays = alike(arrays)
    tokens = sum(int((a[label_name(a)] != IGNORED).sum()) for a in arrays)
    return StepBatch([to_tensors(a, process_group) for a in arrays], tokens, sum(map(count_inputs, arrays)))


def alike(arrays: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Packed micro-batches, padded up to the largest: on a GPU a step of one shape is replayed as a graph."""
    if len(arrays) < 2 or "segments" not in arrays[0]:
        return arrays
    shapes = {name: np.max([a[name].shape for a in arrays], axis=0) for name in arrays[0]}
    return [
        {
            name: np.pad(rows, [(0, n) for n in shapes[name] - rows.shape], constant_values=PADDING.get(name, 0))
            for name, rows in a.items()
        }
        for a in arrays
    ]


def count_inputs(batch: Mapping[str, np.ndarray]) -> int:
    """Tokens of inputs that are not padding, of which a packed row holds several examples."""
    real = batch.get("segments", batch.get("attention_mask"))
    return batch["input_ids"].size if real is None else int((real != 0).sum())


def prefetch(
    batches: Batches, steps: range, micro_batch: int, process_group: ProcessGroup
) -> Generator[StepBatch, None, None]:
    """`assemble` of every step in `steps`, a few of them ahead of the one being used."""
    yield from read_ahead(functools.partial(assemble, batches, micro_batch, process_group), steps)
