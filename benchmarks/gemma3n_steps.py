"""Beside `altup bench gemma3n`: training steps by the clock, in turns; FlexAttention's tiles; profiles.

    python benchmarks/gemma3n_steps.py race "hf layers compiled" altup "altup recorded" --go FILE --out steps.csv
    python benchmarks/gemma3n_steps.py profile "hf eager" altup
    python benchmarks/gemma3n_steps.py tune     # tiles, for --flex

`race` says of each provider where its time goes before it is timed: weights, building, first forward and first
backward pass, what was traced and compiled meanwhile and what came from the caches. With `--go FILE` (see
turns.py) that is done beside other work. Providers that do not fit into memory together are put into groups:

    race "hf flex layers compiled" altup / altup "altup recorded"

where a group is built when the one before it has been timed; each has an equal share of the seconds. All
providers share the weights; a recorded step keeps its memory, the others' is free between turns.

Without a GPU all run at toy sizes, to see that they work.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemma3n_flex import BEST, COMPILER, DEVICE, ON_GPU, SETUP, permit_flex, tune
from turns import Gate, in_words, open_sheet, ratio, say

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Provider
from altup.bench.rows import Sheet
from altup.bench.runner import COMPILING, GIB, TimeIsUp, _number, _spread, fast_math, stopped_after
from altup.bench.timing import Spread, Stopwatch, synchronize, take_turns
from altup.models.stack import compile_layers

BURST = 3  # steps that are timed as one
MOST_UNTIMED = 5  # steps before them
APART = 2e-2  # how far losses may be: bf16 rounds
KINDS = {  # of kernels, by what their names hold: the first that fits
    "attention": ("flash", "fmha", "sdpa", "flex"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "gemv"),
    "kernels of altup": ("_forward_kernel", "_backward_kernel", "_sums_kernel", "_rows"),
    "compiled": ("triton_",),
    "norms": ("layer_norm", "rms_norm", "GammaBeta"),
    "copies": ("copy", "Copy", "Memcpy", "Memset", "Cat", "FillFunctor"),
    "reductions": ("reduce_kernel", "SoftMax", "softmax"),
}


def free() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def allocations() -> int:
    """How often PyTorch has asked the GPU for memory, for which a step waits."""
    return torch.cuda.memory_stats(DEVICE).get("num_device_alloc", 0) if ON_GPU else 0


def compiler_counts() -> dict[str, float]:
    """What the compiler has done so far: graphs, those of them that its caches held, and seconds."""
    counts, seconds = torch._dynamo.utils.counters, torch._dynamo.utils.calculate_time_spent()
    whole, backend = seconds.get("entire_frame_compile", 0.0), seconds.get("backend_compile", 0.0)
    return {
        "graphs": counts["stats"]["unique_graphs"],
        "FX hits": counts["inductor"]["fxgraph_cache_hit"],
        "FX misses": counts["inductor"]["fxgraph_cache_miss"],
        "FX bypassed": counts["inductor"]["fxgraph_cache_bypass"],
        "autograd hits": counts["aot_autograd"]["autograd_cache_hit"],
        "autograd misses": counts["aot_autograd"]["autograd_cache_miss"],
        "s traced": whole - backend,
        "s in the backend": backend,
    }


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Says how long it took, also if it ended early, and what the compiler did."""
    begun, before = time.perf_counter(), compiler_counts()
    try:
        yield
        synchronize(DEVICE)
    finally:
        more = {what: count - before[what] for what, count in compiler_counts().items()}
        told = ", ".join(f"{count:.3g} {what}" for what, count in more.items() if count >= 0.05)
        say(f"  {name}: {time.perf_counter() - begun:.1f} s{told and f' ({told})'}")


def first_step(watch: Stopwatch) -> None:
    """Forward and backward pass as stages of their own."""
    work = watch.work
    forward, backward = work.forward, work.backward

    def staged(name: str, call: Any) -> Callable[[Any], Any]:
        def run(given: Any) -> Any:
            with stage(name):
                return call(given)

        return run

    work.forward, work.backward = staged("first forward", forward), staged("first backward", backward)
    try:
        watch.start_up()
    finally:
        work.forward, work.backward = forward, backward


def on_a_cpu(models: case.Models, rows: int, length: int, tuned: str) -> dict[str, Provider]:
    """The same names, without kernels and Inductor."""
    peers: dict[str, case.Prepare] = {
        "hf layers compiled": partial(case.compiled_layers, **COMPILER),
        "hf flex layers compiled": partial(case.flexible, **COMPILER),
    }
    for name, remake in {"": False, " remake": True}.items():
        plain: Any = partial(case.accelerate, implementation="plain", remake=remake)
        peers |= {f"altup{name}": plain, f"altup recorded{name}": partial(plain, record=True)}
    plain, compiled = peers["altup"], partial(compile_layers, **COMPILER)
    peers["altup layers compiled"] = partial(case.in_turn, plain, compiled)
    builds = {name: partial(models._step, rows, length, tuned, prepare) for name, prepare in peers.items()}
    return {name: Provider(name, build) for name, build in builds.items()}


def settle(watch: Stopwatch) -> None:
    """Steps that do not count, until one has asked the GPU for no more memory."""
    for _ in range(MOST_UNTIMED):
        before = allocations()
        watch.refill()
        if allocations() == before:
            return


class Race:
    """Providers of a step: each is prepared and then has its turns."""

    def __init__(self, rows: int, length: int, size: str, tuned: str, sheet: Sheet | None) -> None:
        self.models = case.Models(SETUP, size)
        self.problem, self.sheet = self.models.step(rows, length, tuned), sheet
        self.providers = {provider.name: provider for provider in self.problem.providers}
        if not ON_GPU:
            self.providers |= on_a_cpu(self.models, rows, length, tuned)
        self.watches: dict[str, Stopwatch] = {}
        self.clock: dict[str, list[float]] = {}
        self.losses: dict[str, float] = {}

    def run(self, groups: Sequence[Sequence[str]], rounds: int, gate: Gate) -> None:
        """One group after the other. What fails or comes too late is said, and the others go on."""
        with self._until_stopped(), gate.building():
            with stage("weights"):
                self.models.whole()
            self._build(groups[0])
        self._compare()
        gate.wait()
        for number, group in enumerate(groups):
            share = gate.left / (len(groups) - number)
            if share <= 0:
                say(f"no time for {', '.join(group)}")
                continue
            until = time.monotonic() + share
            if number:
                with self._until_stopped(), stopped_after(share):
                    self._build(group)
                self._compare()
            self._time(rounds, until)
            self.tell()

    def _build(self, group: Sequence[str]) -> None:
        """A group's providers, without those of the group before that it does not share."""
        for name in [name for name in self.watches if name not in group]:
            del self.watches[name]
        for name in group:
            if name not in self.watches:
                self._try(name, self.prepare)

    def _time(self, rounds: int, until: float) -> None:
        """One round in any case."""
        self.clock = {name: [] for name in self.watches}
        for turn, name in take_turns(self.watches, rounds):
            if turn and time.monotonic() > until:
                say("time limit")
                break
            self._try(name, self.turn)

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            yield
        except TimeIsUp:
            say("building ends: what is ready is timed")

    def _try(self, name: str, do: Callable[[str], None]) -> None:
        try:
            do(name)
        except Exception as error:
            say(f"FAILED {name}: {in_words(error)}")
            self.watches.pop(name, None)
            del error
            free()

    def prepare(self, name: str) -> None:
        free()
        say(f"{name}:")
        provider = self.providers[name]
        with stage("building"):
            watch = Stopwatch(provider.build(), DEVICE)
        first_step(watch)
        with stage("warm-up"):
            watch.warm_up()
        peak = watch.peak_bytes()
        self.losses[name] = self._loss(watch)
        say(f"  ready: {(peak or 0) / GIB:.2f} GiB, loss {self.losses[name]:.5f}")
        if self.sheet is not None and peak is not None:
            self.sheet.add(_number(self.problem, provider, "step", "GiB", peak / GIB))
        self.watches[name] = watch

    def _loss(self, watch: Stopwatch) -> float:
        loss: torch.Tensor = watch.work.forward(0)
        value = loss.item()
        assert watch.work.backward is not None
        watch.work.backward(loss)
        return value

    def _compare(self) -> None:
        """Of the whole model with all its layers."""
        free()
        if self.losses:
            off = max(self.losses.values()) / min(self.losses.values()) - 1
            say(f"losses differ by {off:.1e}{'' if off < APART else ': they DISAGREE'}")

    def turn(self, name: str) -> None:
        watch = self.watches[name]
        free()
        settle(watch)
        begun = time.perf_counter()
        for _ in range(BURST):
            watch._repeat()
        synchronize(DEVICE)
        self.clock[name].append(1000 * (time.perf_counter() - begun) / BURST)
        say(f"  {name}: {self.clock[name][-1]:.1f} ms")

    def tell(self) -> None:
        """Medians, and by how much each is faster than the first of its group, round by round."""
        times = {name: values for name, values in self.clock.items() if values}
        for name, values in times.items():
            spread, first = Spread.of(values), next(iter(times))
            say(f"{name}: {spread.p50:.1f} ms ({spread.p20:.1f} to {spread.p80:.1f})")
            common = min(len(values), len(times[first]))
            if name != first:
                faster, error = ratio(times[first][:common], values[:common])
                say(f"  {faster:.3f} ± {error:.3f} times as fast as {first}")
            if self.sheet is not None:
                row = _spread(self.problem, self.providers[name], "step", "ms", spread)
                self.sheet.add(replace(row, note=self._note(name, times)))

    def _note(self, name: str, others: Sequence[str] | dict[str, Any]) -> str:
        note = f"by the clock, bursts of {BURST} steps, in turns: {', '.join(others)}"
        return f"{note}; {json.dumps(case.FLEX)}" if "flex" in name and case.FLEX else note

    def profile(self, name: str, most: int = 25) -> list[tuple[float, int, str]]:
        """(microseconds, launches, name) of a step's kernels."""
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CUDA if ON_GPU else activities.CPU]) as seen:
            self.watches[name].refill()
        events = [
            (e.self_device_time_total if ON_GPU else e.self_cpu_time_total, e.count, e.key)
            for e in seen.key_averages()
        ]
        show(name, events, most)
        return events


def show(name: str, events: list[tuple[float, int, str]], most: int = 25) -> None:
    print(f"{name}: {sum(e[0] for e in events) / 1000:.1f} ms in {sum(e[1] for e in events)} kernels")
    kinds: dict[str, float] = {}
    for microseconds, _, key in events:
        kind = next((kind for kind, parts in KINDS.items() if any(part in key for part in parts)), "others")
        kinds[kind] = kinds.get(kind, 0.0) + microseconds / 1000
    for kind, milliseconds in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"  {milliseconds:9.2f} ms  {kind}")
    for microseconds, count, key in sorted(events, reverse=True)[:most]:
        print(f"    {microseconds / 1000:9.3f} ms {count:6d} × {key[:110]}")


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """`a b / c d` → [[a, b], [c, d]]"""
    groups: list[list[str]] = [[]]
    for name in names:
        if name == "/":
            groups.append([])
        else:
            groups[-1].append(name)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("race", "profile", "tune"))
    parser.add_argument("providers", nargs="*", default=["hf eager", "altup"], help="as `altup bench` names them")
    parser.add_argument("--size", choices=tuple(case.SHAPES), default="E2B")
    parser.add_argument("--tuned", choices=tuple(case.TUNED), default="all", help="which weights")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048 if ON_GPU else 12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--flex", type=json.loads, default=BEST, help="kernel options of FlexAttention, JSON; {} for PyTorch's own"
    )
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    Gate.add_flags(parser, build_s=300, time_s=60)
    given = parser.parse_args()
    say(f"imported, torch {torch.__version__}")
    permit_flex()
    case.FLEX.update(given.flex)
    with fast_math(), torch._dynamo.config.patch(COMPILING):
        if given.what == "tune":
            say(f"best: --flex '{json.dumps(tune(given.rows, given.length, given.build_s))}'")
            return
        sheet = open_sheet(given.out, DEVICE, SETUP.dtype) if given.out else None
        race = Race(given.rows, given.length, given.size, given.tuned, sheet)
        if unknown := set(given.providers) - {*race.providers, "/"}:
            parser.error(f"{', '.join(unknown)}: not among {', '.join(race.providers)}")
        if given.what == "race":
            race.run(groups_of(given.providers), given.rounds, Gate.of(given))
            return
        for name in given.providers:
            race.prepare(name)
            race.profile(name)
            race.watches.pop(name)


if __name__ == "__main__":
    main()
