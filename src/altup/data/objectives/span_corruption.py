"""Span corruption, T5's objective: replace random spans by sentinels and ask for what they hid.

raw      Thank you for inviting me to your party last week .
inputs   Thank you <X> me to your party <Y> week . </s>
targets  <X> for inviting <Y> last </s>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from altup.core.errors import UserError, check_range, check_whole
from altup.data.randomness import choose
from altup.data.tokenizer import SENTINELS

OURS = len(SENTINELS)


def noise_counts(raw_length: int, noise_density: float, mean_span: float) -> tuple[int, int]:
    """Noise tokens and noise spans of a raw sequence."""
    noise = min(max(round(raw_length * noise_density), 1), raw_length - 1)
    spans = min(max(round(noise / mean_span), 1), noise, raw_length - noise)
    return noise, spans


def lengths(input_length: int, noise_density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
    """The longest raw length whose inputs, with sentinels and eos, fit `input_length`; and its targets' length.

    512 → 568 and 114.
    """

    def inputs(raw: int) -> int:
        noise, spans = noise_counts(raw, noise_density, mean_span)
        return raw - noise + spans + 1

    raw = 2
    while inputs(raw + 1) <= input_length:
        raw += 1
    noise, spans = noise_counts(raw, noise_density, mean_span)
    return raw, noise + spans + 1


class SpanCorruption:
    """`[n, raw_length]` → `input_ids [n, input_length]` and `labels [n, target_length]`, without padding.

    Noise and kept tokens are each cut into the same number of spans, every cut equally likely; a sequence starts
    with a kept span and ends with a noise span. Sentinel s stands for noise span s; there is no closing sentinel.
    """

    def __init__(
        self,
        sentinels: Sequence[int],
        eos: int,
        input_length: int = 512,
        noise_density: float = 0.15,
        mean_span: float = 3.0,
    ):
        check_whole("input_length", input_length, 4)
        check_range("noise_density", noise_density, 0.01, 0.99)
        check_range("mean_span", mean_span, 1, input_length)
        self.input_length, self.noise_density, self.mean_span = input_length, noise_density, mean_span
        self.raw_length, self.target_length = lengths(input_length, noise_density, mean_span)
        self.targets = self.target_length
        self.noise, self.spans = noise_counts(self.raw_length, noise_density, mean_span)
        if self.spans > len(sentinels):
            raise UserError(
                f"input_length={input_length} needs {self.spans} sentinels, the tokenizer has {len(sentinels)}; "
                "shorten the input (--inputs-length), raise mean_span, or lower noise_density"
                + (
                    f"; a vocabulary made with `altup prepare --vocab-size` has {OURS}"
                    if self.spans <= OURS
                    else ""
                )
            )
        self._eos = eos
        self._sentinels = np.array(sentinels[: self.spans], np.int32)

    def describe(self) -> dict[str, Any]:
        return {
            "objective": "span-corruption",
            "input_length": self.input_length,
            "target_length": self.target_length,
            "raw_length": self.raw_length,
            "noise_density": self.noise_density,
            "mean_span": self.mean_span,
        }

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        n, raw = len(raw), raw.astype(np.int32)
        noise_lengths = self._segment(key, self.noise, stream=0)
        kept_lengths = self._segment(key, self.raw_length - self.noise, stream=1)
        starts = np.cumsum(kept_lengths, axis=1)  # of each noise span, once the noise before it is added
        starts[:, 1:] += np.cumsum(noise_lengths, axis=1)[:, :-1]
        rows = np.arange(n)[:, None]

        edges = np.zeros((n, self.raw_length + 1), np.int8)
        edges[rows, starts] = 1
        edges[rows, starts + noise_lengths] = -1
        noise = np.cumsum(edges[:, :-1], axis=1, dtype=np.int8).view(bool)
        hidden = raw[noise].reshape(n, self.noise)

        raw[rows, starts] = self._sentinels
        noise[rows, starts] = False
        inputs = np.full((n, self.input_length), self._eos, np.int32)
        width = self.raw_length - self.noise + self.spans
        inputs[:, :width] = raw[~noise].reshape(n, width)  # n may be 0, where -1 means nothing

        before = np.cumsum(noise_lengths, axis=1) - noise_lengths  # noise tokens before each span
        places = before + np.arange(self.spans)  # of the sentinels in the targets
        labels = np.full((n, self.target_length), self._eos, np.int32)
        is_token = np.ones((n, self.target_length), bool)
        is_token[:, -1] = False
        is_token[rows, places] = False
        labels[is_token] = hidden.ravel()
        labels[rows, places] = self._sentinels
        return {"input_ids": inputs, "labels": labels}

    def _segment(self, key: np.ndarray, tokens: int, stream: int) -> np.ndarray:
        """`[n, spans]` lengths of at least 1 that add up to `tokens`, every such division equally likely."""
        cuts = choose(key, self.spans - 1, tokens - 1, stream) + 1
        edges = np.empty((len(key), self.spans + 1), np.int64)
        edges[:, 0], edges[:, 1:-1], edges[:, -1] = 0, cuts, tokens
        return np.diff(edges, axis=1)
