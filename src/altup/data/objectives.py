"""What a model learns from a raw sequence: span corruption (T5), masked (BERT) or causal language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from altup.core.errors import UserError, check_choice, check_range, check_whole, named
from altup.data.randomness import below, choose, draws
from altup.data.tokenizer import SENTINELS, Vocabulary

OBJECTIVES = ("span-corruption", "masked", "causal")
IGNORED = -100  # the label of a position whose token is not predicted


class Objective(Protocol):
    raw_length: int

    @property
    def targets(self) -> int:
        """How many tokens of a sequence the model has to predict."""

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        """`[n, raw_length]` tokens and `[n]` random keys → int32 arguments of a model's forward pass, n rows each:
        `input_ids` and the labels."""

    def describe(self) -> dict[str, Any]: ...


def build_objective(
    name: str,
    vocabulary: Vocabulary,
    length: int = 512,
    noise_density: float = 0.15,
    mean_span: float = 3.0,
) -> Objective:
    """The objective `name` for inputs of `length` tokens."""
    check_choice("objective", name, OBJECTIVES)
    if name == "span-corruption":
        return SpanCorruption(vocabulary.sentinels, vocabulary.eos, length, noise_density, mean_span)
    if name == "causal":
        return Causal(vocabulary.eos if vocabulary.start is None else vocabulary.start, length)
    if name != "masked":
        raise ValueError(f"objective {name!r} cannot be built yet")
    if vocabulary.mask is None:
        raise UserError("the tokenizer has no mask token; take one that has, or train one with --vocab-size")
    return Masked(vocabulary.mask, vocabulary.size, vocabulary.start, vocabulary.eos, length, noise_density)


def noise_counts(raw_length: int, noise_density: float, mean_span: float) -> tuple[int, int]:
    """Noise tokens and noise spans of a raw sequence."""
    noise = min(max(round(raw_length * noise_density), 1), raw_length - 1)
    spans = min(max(round(noise / mean_span), 1), noise, raw_length - noise)
    return noise, spans


def span_lengths(input_length: int, noise_density: float = 0.15, mean_span: float = 3.0) -> tuple[int, int]:
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
    """T5's objective: sentinels replace random spans, and the targets are what they hide.

    raw      Thank you for inviting me to your party last week .
    inputs   Thank you <X> me to your party <Y> week . </s>
    targets  <X> for inviting <Y> last </s>

    `[n, raw_length]` → `input_ids [n, input_length]` and `labels [n, target_length]`, without padding.
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
        self.raw_length, self.target_length = span_lengths(input_length, noise_density, mean_span)
        self.targets = self.target_length
        self.noise, self.spans = noise_counts(self.raw_length, noise_density, mean_span)
        if self.spans > len(sentinels):
            trained = len(SENTINELS)
            enough = self.spans <= trained
            raise UserError(
                f"{named('input_length', input_length)} needs {self.spans} sentinels, the tokenizer has "
                f"{len(sentinels)}; "
                "shorten the input (--inputs-length), raise mean_span, or lower noise_density"
                + (f"; a vocabulary made with `altup prepare --vocab-size` has {trained}" if enough else "")
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
        starts = np.cumsum(kept_lengths, axis=1)  # of the noise spans, without the noise before them
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
        inputs[:, :width] = raw[~noise].reshape(n, width)  # reshape(n, -1) fails where n is 0

        before = np.cumsum(noise_lengths, axis=1) - noise_lengths  # noise tokens before each span
        positions = before + np.arange(self.spans)  # of the sentinels in the targets
        labels = np.full((n, self.target_length), self._eos, np.int32)
        is_token = np.ones((n, self.target_length), bool)
        is_token[:, -1] = False
        is_token[rows, positions] = False
        labels[is_token] = hidden.ravel()
        labels[rows, positions] = self._sentinels
        return {"input_ids": inputs, "labels": labels}

    def _segment(self, key: np.ndarray, tokens: int, stream: int) -> np.ndarray:
        """`[n, spans]` lengths of at least 1 that add up to `tokens`, every such division equally likely."""
        cuts = choose(key, self.spans - 1, tokens - 1, stream) + 1
        edges = np.empty((len(key), self.spans + 1), np.int64)
        edges[:, 0], edges[:, 1:-1], edges[:, -1] = 0, cuts, tokens
        return np.diff(edges, axis=1)


class Masked:
    """BERT's objective: `[n, raw_length]` → `input_ids` and `labels [n, length]`, `masked_positions [n, asked]`.

    The model predicts a fixed share of the raw tokens (15 %). The mask token replaces 80 % of these, a random
    token 10 %, and 10 % stay as they are. All other labels are -100. The start token, if the vocabulary has one,
    and eos enclose the inputs. The head needs to run at `masked_positions` only, where the labels are.
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
        positions = choose(key, self.asked, self.raw_length, stream=0) + self._first
        rows = np.arange(n)[:, None]
        asked = inputs[rows, positions]
        labels = np.full((n, self.length), IGNORED, np.int32)
        labels[rows, positions] = asked
        fate = below(draws(key, self.asked, stream=1), 10)
        random = below(draws(key, self.asked, stream=2), self._vocab_size).astype(np.int32)
        inputs[rows, positions] = np.where(fate < 8, self._mask, np.where(fate == 8, random, asked))
        return {"input_ids": inputs, "labels": labels, "masked_positions": positions.astype(np.int32)}


class Causal:
    """Predict every token from those before it.

    `[n, length]` → `input_ids`, the raw tokens after a start token, and `shift_labels`, the raw tokens:
    `shift_labels[t]` is the token after `input_ids[t]`. Each token of the text is predicted once an epoch.
    `shift_labels` is Hugging Face's name for labels that are already shifted; a model shifts `labels` itself.
    """

    def __init__(self, start: int, length: int = 512):
        check_whole("length", length, 1)
        self.raw_length, self.targets, self._start = length, length, start

    def describe(self) -> dict[str, Any]:
        lengths = dict.fromkeys(("input_length", "target_length", "raw_length"), self.raw_length)
        return {"objective": "causal", **lengths}

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        labels = raw.astype(np.int32)
        inputs = np.empty_like(labels)
        inputs[:, 0], inputs[:, 1:] = self._start, labels[:, :-1]
        return {"input_ids": inputs, "shift_labels": labels}
