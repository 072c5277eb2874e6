"""Masked language modelling, BERT's objective."""

from __future__ import annotations

from typing import Any

import numpy as np

from altup.core.errors import check_range, check_whole
from altup.data.randomness import below, choose, draws

IGNORED = -100


class Masked:
    """`[n, raw_length]` → `input_ids` and `labels [n, length]`, and `masked_positions [n, asked]`.

    A fixed share of the raw tokens (15 %) is asked for: of these 80 % are replaced by the mask token, 10 % by a
    random one, 10 % stay as they are. All other labels are -100. Inputs stand between the start token, if the
    vocabulary has one, and eos. `masked_positions` are the places of the labels: a head need run nowhere else.
    """

    def __init__(
        self,
        mask: int,
        vocab_size: int,
        start: int | None,
        eos: int,
        length: int = 512,
        noise_density: float = 0.15,
    ):
        check_whole("length", length, 4)
        check_range("noise_density", noise_density, 0.01, 0.99)
        self.length, self.noise_density = length, noise_density
        self._mask, self._vocab_size, self._start, self._eos = mask, vocab_size, start, eos
        self._first = 0 if start is None else 1
        self.raw_length = length - 1 - self._first
        self.asked = self.targets = max(1, round(self.raw_length * noise_density))

    def describe(self) -> dict[str, Any]:
        return {
            "objective": "masked",
            "input_length": self.length,
            "target_length": self.targets,
            "raw_length": self.raw_length,
            "noise_density": self.noise_density,
        }

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        n = len(raw)
        inputs = np.full((n, self.length), self._eos, np.int32)
        if self._start is not None:
            inputs[:, 0] = self._start
        inputs[:, self._first : -1] = raw
        places = choose(key, self.asked, self.raw_length, stream=0) + self._first
        rows = np.arange(n)[:, None]
        asked = inputs[rows, places]
        labels = np.full((n, self.length), IGNORED, np.int32)
        labels[rows, places] = asked
        fate = below(draws(key, self.asked, stream=1), 10)
        random = below(draws(key, self.asked, stream=2), self._vocab_size).astype(np.int32)
        inputs[rows, places] = np.where(fate < 8, self._mask, np.where(fate == 8, random, asked))
        return {"input_ids": inputs, "labels": labels, "masked_positions": places.astype(np.int32)}
