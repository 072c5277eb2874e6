"""The table of cases."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from altup.bench.problem import Problem, Setup


class Case(NamedTuple):
    """`function(setup)` of a module here yields the problems."""

    question: str
    module: str
    function: str = "problems"


CASES = {
    "step": Case("forward and backward of a whole T5, ours and Hugging Face's", "step"),
    "rule": Case("the AltUp update of the wide state", "rule"),
    "attention": Case("self-attention with T5's trainable relative bias", "attention"),
    "head": Case("output head and loss", "fused", "head_problems"),
    "dropout": Case("dropout before a residual addition", "fused", "dropout_problems"),
    "optimizer": Case("the update of all weights, beside a step", "optimizer"),
    "generation": Case("greedy decoding", "generation"),
    "data": Case("making training sequences, and tokenising", "data"),
}


def problems(names: Sequence[str], setup: Setup) -> Iterator[Problem]:
    """The problems of the named cases; each is made after the one before is finished."""
    for name in names:
        case = CASES[name]
        made: Iterable[Problem] = getattr(importlib.import_module(f"{__name__}.{case.module}"), case.function)(
            setup
        )
        yield from made
