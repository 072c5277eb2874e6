"""What a model learns from a raw sequence: span corruption, masked or causal language modelling."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from altup.core.errors import UserError, check_choice
from altup.data.objectives.causal import Causal
from altup.data.objectives.masked import Masked
from altup.data.objectives.span_corruption import SpanCorruption
from altup.data.tokenizer import Vocabulary

__all__ = ["OBJECTIVES", "Causal", "Masked", "Objective", "SpanCorruption", "build_objective"]

OBJECTIVES = ("span-corruption", "masked", "causal")


class Objective(Protocol):
    raw_length: int

    @property
    def targets(self) -> int:
        """How many tokens of a sequence are asked for."""

    def __call__(self, raw: np.ndarray, key: np.ndarray) -> dict[str, np.ndarray]:
        """`[n, raw_length]` tokens and `[n]` random keys → int32 inputs of a model's forward pass, n rows each:
        `input_ids` and its labels."""

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
    if vocabulary.mask is None:
        raise UserError("the tokenizer has no mask token; take one that has, or train one with --vocab-size")
    return Masked(vocabulary.mask, vocabulary.size, vocabulary.start, vocabulary.eos, length, noise_density)
