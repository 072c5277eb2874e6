"""Batches made ahead on a background thread, so that the device never waits for the data."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from altup.data.batches import Batches


@dataclass
class StepBatch:
    """One process's share of a step: a dict of tensors a micro-batch, and how many labels count in them."""

    micro: list[dict[str, torch.Tensor]]
    tokens: int


def share(size: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous positions of a micro-batch of `size` that process `rank` of `world` takes."""
    return size * rank // world, size * (rank + 1) // world


def assemble(
    batches: Batches, step: int, *, batch_size: int, micro_batch: int, rank: int, world: int, pin: bool
) -> StepBatch:
    """Process `rank`'s share of global step `step`, a pure function of its arguments."""
    first, last = share(micro_batch, rank, world)
    micro, tokens = [], 0
    for begin in range(0, batch_size, micro_batch):
        arrays = batches.examples(step, begin + first, begin + last)
        tokens += int((arrays["labels"] != -100).sum())
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)) for name, a in arrays.items()}
        micro.append({name: t.pin_memory() for name, t in tensors.items()} if pin else tensors)
    return StepBatch(micro, tokens)


def prefetch(
    batches: Batches,
    steps: range,
    *,
    micro_batch: int,
    rank: int = 0,
    world: int = 1,
    pin: bool = False,
    depth: int = 4,
) -> Iterator[StepBatch]:
    """`assemble` of every step in `steps`, `depth` of them ahead of the one being used."""
    make = functools.partial(
        assemble,
        batches,
        batch_size=batches.batch_size,
        micro_batch=micro_batch,
        rank=rank,
        world=world,
        pin=pin,
    )
    ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: StepBatch | BaseException) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for step in steps:
                if closed.is_set():
                    return
                put(make(step))
        except BaseException as error:  # handed to the consumer, who raises it
            put(error)

    thread = threading.Thread(target=work, name="altup-prefetch", daemon=True)
    thread.start()
    try:
        for _ in steps:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
