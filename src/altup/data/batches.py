"""Batches for training: what step s of seed r contains is a pure function, so resuming costs nothing.

The stream is cut into n sequences of the objective's raw length (a shorter tail is dropped, and counted). The
global counter g = step · batch_size + position gives the epoch g // n and the place g % n; a permutation keyed by
(seed, epoch) turns the place into a sequence, and (seed, epoch, sequence) keys the randomness of its masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from altup.core.errors import UserError, check_whole
from altup.data import HELD_OUT_PARTS
from altup.data.objectives import Objective
from altup.data.randomness import keys, permute
from altup.data.shards import TokenStream

ORDER, MASKS, HELD_OUT = 1, 2, 3  # first coordinates of keys, so that no two uses share one
Step = TypeVar("Step")
Result = TypeVar("Result")


class Batches(Protocol):
    batch_size: int
    sequences_per_epoch: int

    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Examples start..stop-1 of global step `step` (from 0): a pure function of data, seed, step, position."""

    def describe(self) -> dict[str, Any]:
        """JSON-able identity, compared at resume."""


class ShardBatches:
    """Every sequence of a token stream once an epoch, in another order and with other masks each time."""

    def __init__(self, stream: TokenStream, objective: Objective, batch_size: int, seed: int = 0):
        check_whole("batch_size", batch_size, 1)
        check_whole("seed", seed, 0)
        self.stream, self.objective, self.batch_size, self.seed = stream, objective, batch_size, seed
        self.sequences_per_epoch = _sequences(stream, objective)
        self.tail_tokens = len(stream) % objective.raw_length

    def describe(self) -> dict[str, Any]:
        return {
            "data": self.stream.sha256,
            "tokenizer": self.stream.vocabulary.sha256,
            "vocabulary": self.stream.vocabulary.seal,
            "split": self.stream.split,
            **self.objective.describe(),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def order(self, step: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and sequence number of the examples start..stop-1 of a step."""
        epoch, place = np.divmod(step * self.batch_size + np.arange(start, stop), self.sequences_per_epoch)
        return epoch, permute(place, self.sequences_per_epoch, keys(self.seed, ORDER, epoch))

    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        epoch, sequence = self.order(step, start, stop)
        raw = self.stream.windows(sequence * self.objective.raw_length, self.objective.raw_length)
        return self.objective(raw, keys(self.seed, MASKS, epoch, sequence))


class HeldOut:
    """A fixed set of sequences in the order of the text, with the same masks at every evaluation.

    `part` takes every other sequence: what is chosen on the part "tuning" can be reported on "reporting", which
    shares no token with it.
    """

    def __init__(
        self, stream: TokenStream, objective: Objective, limit: int | None = None, seed: int = 0, part: str = "all"
    ):
        self.stream, self.objective, self.seed, self.part = stream, objective, seed, part
        available = _sequences(stream, objective)
        count = available if limit is None else min(limit, available)
        check_whole("limit", count, 1)
        spread = np.arange(count) * available // count  # over the whole text
        self._sequences = spread[HELD_OUT_PARTS[part]]
        check_whole("examples of this part", len(self._sequences), 1)

    def __len__(self) -> int:
        return len(self._sequences)

    def examples(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Examples start..stop-1; fewer where the set ends."""
        sequence = self._sequences[start:stop]
        raw = self.stream.windows(sequence * self.objective.raw_length, self.objective.raw_length)
        return self.objective(raw, keys(self.seed, HELD_OUT, sequence))

    def describe(self) -> dict[str, Any]:
        described = {"data": self.stream.sha256, "examples": len(self), "seed": self.seed}
        if self.part != "all":
            described["part"] = self.part
        return {**described, **self.objective.describe()}


def _sequences(stream: TokenStream, objective: Objective) -> int:
    count = len(stream) // objective.raw_length
    if not count:
        raise UserError(
            f"split {stream.split!r} of {stream.folder} has {len(stream)} tokens, fewer than one sequence of "
            f"{objective.raw_length}; prepare more text, hold out a larger part (--validation-fraction), "
            "or give a smaller --inputs-length"
        )
    return count


def read_ahead(
    make: Callable[[Step], Result], steps: Iterable[Step], threads: int = 2, ahead: int = 4
) -> Iterator[Result]:
    """`make(step)` for each step, in order, made in background threads before they are asked for.

    NumPy releases the GIL while it works, so threads overlap with training and with each other.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="altup-batches") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for step in steps:
                waiting.append(pool.submit(make, step))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
