"""What the scripts in benchmarks/ share: problems of their own on the stopwatch of `altup bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from altup.bench.cases import BenchConfig
from altup.bench.problem import Problem, Setup
from altup.bench.rows import BenchRow, Machine, Sheet
from altup.bench.runner import measure


def run_script(
    doc: str | None,
    make: Callable[[Setup], Iterable[Problem]],
    clock: str = "device",
    seconds: float | None = None,
) -> list[BenchRow]:
    """The rows of these problems, with options from the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument("--size", action="append", default=[], help="of models: small, base, large or xl")
    parser.add_argument("--only", action="append", default=[], help="providers, such as 'altup*'")
    parser.add_argument("--where", action="append", default=[], help="sizes, such as batch=8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=seconds, help="stop then, with what was measured")
    parser.add_argument("--clock", choices=("device", "host"), default=clock)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="add the rows to this .csv or .jsonl file")
    given = parser.parse_args()
    config = BenchConfig(
        cases=["step"], quick=given.quick, sizes=given.size, only=given.only, where=given.where,
        repeat=given.rounds, time_limit=given.seconds, clock=given.clock, profile=given.profile,
    )  # fmt: skip

    def sheets(machine: Machine) -> list[Sheet]:
        machine = replace(machine, command=shlex.join(["python", *sys.argv]))
        return [Sheet(given.out, machine)] if given.out else []

    def problems(cases: Sequence[str], setup: Setup) -> Iterable[Problem]:
        return make(setup)

    return measure(config, sheets, lambda text: print(text, file=sys.stderr), problems)
