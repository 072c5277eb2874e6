"""The cases by name. A case is a module here with a function `problems(setup)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from altup.bench.problem import Problem, Setup

CASES = {
    "step": "forward and backward of a whole T5, ours and Hugging Face's",
    "rule": "the AltUp update of the wide state",
    "attention": "self-attention with T5's trainable relative bias",
    "head": "output head and loss",
    "dropout": "dropout before a residual addition",
    "optimizer": "the update of all weights, beside a step",
    "generation": "greedy decoding",
    "data": "making training sequences, and tokenising",
}


def problems(names: Sequence[str], setup: Setup) -> Iterator[Problem]:
    """Those of the named cases, each made when the one before is done with."""
    for name in names:
        module = importlib.import_module(f"altup.bench.cases.{name}")
        made: Iterable[Problem] = module.problems(setup)
        yield from made
