"""The table of cases, and the settings of a run."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from altup.core.errors import UserError
from altup.core.schema import Settings, setting

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
    "streams": Case("one site of hyper-connections with coefficients from the data (mHC)", "streams"),
    "attention": Case("self-attention with T5's trainable relative bias", "attention"),
    "head": Case("output head and loss", "fused", "head_problems"),
    "dropout": Case("dropout before a residual addition", "fused", "dropout_problems"),
    "kernels": Case("every kernel and compiled code of the same, where models use it", "kernels"),
    "optimizer": Case("the update of all weights, beside a step", "optimizer"),
    "generation": Case("greedy decoding", "generation"),
    "gemma3n": Case("Gemma 3n of Hugging Face, as it is and accelerated", "gemma3n"),
    "data": Case("making training sequences, and tokenising", "data"),
}


@dataclass(kw_only=True)
class BenchConfig(Settings):
    """Which cases are measured, and how. `time_limit` is in seconds."""

    cases: list[str] = setting([], choices=CASES)
    quick: bool = setting(
        False, "Toy sizes: about a minute, on a CPU too.", panel="Options", flag="--quick", after="cases"
    )
    sizes: list[str] = setting(
        [], "Model of `step`: small, base (default), large or xl. Repeatable.",
        panel="Options", flag="--size", choices=("small", "base", "large", "xl"),
    )  # fmt: skip
    only: list[str] = setting([], "Providers to run, such as 'altup*'. Repeatable.", panel="Options")
    where: list[str] = setting(
        [], "Sizes to run, such as batch=4 or 'method=lora'. Repeatable: of one name any, of several all.",
        panel="Options",
    )  # fmt: skip
    unchecked: bool = setting(
        False, "Do not compare with the reference first, for providers that were compared before.",
        panel="Options", flag="--unchecked",
    )  # fmt: skip
    repeat: int | None = setting(
        None, "Rounds of timing.", shown="10; 3 with --quick", panel="Options", at_least=1
    )
    time_limit: float | None = setting(
        None, "Seconds after which it stops, with what was measured.", shown="none", panel="Options", above=0
    )
    clock: str = setting(
        "device", "device: events on a GPU. host: whole bursts by the clock, as a training loop sees them.",
        panel="Options", choices=("device", "host"),
    )  # fmt: skip
    profile: bool = setting(
        False, "Print what runs on the device in one repetition, by kind.", panel="Options", flag="--profile"
    )
    cold: bool = setting(
        False, "Measure the start of compiled providers alone, without any cache.", panel="Options", flag="--cold"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cases = self.cases or list(CASES)
        self.sizes = self.sizes or ["base"]
        self.repeat = self.repeat or (3 if self.quick else 10)
        for text in self.where:
            if "=" not in text:
                raise UserError(f"where={text}: write name=value, such as batch=4")


def problems(names: Sequence[str], setup: Setup) -> Iterator[Problem]:
    """The problems of the named cases; each is made after the one before is finished."""
    for name in names:
        case = CASES[name]
        made: Iterable[Problem] = getattr(importlib.import_module(f"{__name__}.{case.module}"), case.function)(
            setup
        )
        yield from made
