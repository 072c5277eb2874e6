"""Beside `altup bench gemma3n`: training steps by the clock, in turns; the compiler's cache; profiles.

    python benchmarks/gemma3n_steps.py compile --peer hf           # a minute or two, into TORCHINDUCTOR_CACHE_DIR
    python benchmarks/gemma3n_steps.py race "hf layers compiled" altup "altup recorded" --out steps.csv
    python benchmarks/gemma3n_steps.py profile "hf eager" altup

Layers of E2B make eight graphs, forward and backward, and the head one more. `compile` makes one after the other
with the rest of the model left out, in a few GiB, so that several processes can share the work (`--part`). The
cache then serves the race, whose layers are the same code on the same shapes.

Without a GPU all run at toy sizes, to see that they work.
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Provider, Setup
from altup.bench.rows import Machine, Sheet
from altup.bench.runner import COMPILING, GIB, _number, _spread, fast_math
from altup.bench.timing import Spread, Stopwatch, synchronize, take_turns
from altup.models.stack import compile_layers

BEGUN = time.perf_counter()
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SETUP = Setup(DEVICE, quick=not ON_GPU, compiles=ON_GPU, runs_triton=ON_GPU)
COMPILER: dict[str, Any] = {} if ON_GPU else {"backend": "aot_eager"}
FEW = {"vocab_size": 1024, "vocab_size_per_layer_input": 1024} if ON_GPU else {}  # words, where none are read
# Sliding and full attention of dense layers and sparse ones; the last that make keys, alone and with a reader.
PARTS = (((10,), (0,), (14,), (4,), ()), ((18,), (18, 20), (19,), (19, 24)))
BURST = 3  # steps that are timed as one
KINDS = {  # of kernels, by what their names hold: the first that fits
    "attention": ("flash", "fmha", "sdpa", "flex"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "gemv"),
    "kernels of altup": ("_forward_kernel", "_backward_kernel", "_sums_kernel", "_rows"),
    "compiled": ("triton_",),
    "norms": ("layer_norm", "rms_norm", "GammaBeta"),
    "copies": ("copy", "Copy", "Memcpy", "Memset", "Cat", "FillFunctor"),
    "reductions": ("reduce_kernel", "SoftMax", "softmax"),
}


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {text}", flush=True)


def free() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def pass_on(state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return state


def compile_parts(peer: str, groups: tuple[tuple[int, ...], ...], rows: int, length: int) -> None:
    """One group of E2B's layers after the other; the empty one is the head, with all its words."""
    for group in groups:
        models = case.Models(SETUP, "E2B")
        deep = case.SHAPES["E2B"] if group else case.SHALLOW
        models.fields = {**({} if ON_GPU else case.QUICK), **FEW, **deep}
        if not group:
            models.fields.pop("vocab_size", None)
        whole = models.whole()
        for index, layer in enumerate(whole.model.layers):
            if index not in group:
                layer.mlp = nn.Identity()  # most of its weights
        model = case.adapted(whole, "all").train()
        if peer == "flex":
            model.set_attn_implementation("flex_attention")
        if group:
            compile_layers(model, **COMPILER)
        else:
            case.compiled_layers(model, **COMPILER)
        for index, layer in enumerate(model.model.layers):
            if index not in group:
                layer._compiled_call_impl, layer.forward = None, pass_on
        ids = models._ids(rows, length) % (FEW.get("vocab_size") or case.QUICK["vocab_size"])
        model(input_ids=ids, labels=ids).loss.backward()
        synchronize(DEVICE)
        say(f"{peer} {group or 'head'}")
        del models, whole, model
        free()


def on_a_cpu(models: case.Models, rows: int, length: int, tuned: str) -> dict[str, Provider]:
    """The same names, without kernels and Inductor."""
    peers: dict[str, case.Prepare] = {"hf layers compiled": partial(case.compiled_layers, **COMPILER)}
    for name, remake in {"": False, " remake": True}.items():
        plain: Any = partial(case.accelerate, implementation="plain", remake=remake)
        peers |= {f"altup{name}": plain, f"altup recorded{name}": partial(plain, record=True)}
    return {
        name: Provider(name, partial(models._step, rows, length, tuned, prepare))
        for name, prepare in peers.items()
    }


class Race:
    """Providers of a step: each is prepared and then has its turns."""

    def __init__(self, size: str, rows: int, length: int, tuned: str, sheet: Sheet | None) -> None:
        self.models = case.Models(SETUP, size)
        self.problem, self.sheet = self.models.step(rows, length, tuned), sheet
        self.providers = {provider.name: provider for provider in self.problem.providers}
        if not ON_GPU:
            self.providers |= on_a_cpu(self.models, rows, length, tuned)
        self.watches: dict[str, Stopwatch] = {}
        self.clock: dict[str, list[float]] = {}

    def prepare(self, name: str) -> None:
        free()
        provider = self.providers[name]
        torch._dynamo.utils.counters.clear()
        watch = Stopwatch(provider.build(), DEVICE)
        seconds = watch.start_up()
        watch.warm_up()
        peak = watch.peak_bytes()
        counts = torch._dynamo.utils.counters
        found = {name: counts["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
        graphs = counts["stats"]["unique_graphs"]
        say(f"{name}: first step {seconds:.1f} s, {(peak or 0) / GIB:.2f} GiB, {graphs} graphs compiled, {found}")
        if self.sheet is not None and peak is not None:
            self.sheet.add(_number(self.problem, provider, "step", "GiB", peak / GIB))
        self.watches[name], self.clock[name] = watch, []

    def turn(self, name: str) -> None:
        watch = self.watches[name]
        free()
        watch.refill()
        begun = time.perf_counter()
        for _ in range(BURST):
            watch._repeat()
        synchronize(DEVICE)
        self.clock[name].append(1000 * (time.perf_counter() - begun) / BURST)

    def tell(self) -> None:
        for name, values in self.clock.items():
            spread = Spread.of(values)
            say(f"{name}: {spread.p50:.1f} ms ({spread.p20:.1f} to {spread.p80:.1f})")
            if self.sheet is not None:
                self.sheet.add(_spread(self.problem, self.providers[name], "step", "ms", spread))

    def profile(self, name: str) -> None:
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CUDA if ON_GPU else activities.CPU]) as seen:
            self.watches[name].refill()
        show(
            name,
            [
                (e.self_device_time_total if ON_GPU else e.self_cpu_time_total, e.count, e.key)
                for e in seen.key_averages()
            ],
        )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "race", "profile"))
    parser.add_argument("providers", nargs="*", default=["hf eager", "altup"], help="as `altup bench` names them")
    parser.add_argument("--peer", choices=("hf", "flex"), default="hf", help="what `compile` compiles")
    parser.add_argument("--part", type=int, choices=range(len(PARTS)), help="of `compile`; both by default")
    parser.add_argument("--size", choices=tuple(case.SHAPES), default="E2B")
    parser.add_argument("--tuned", choices=tuple(case.TUNED), default="all", help="which weights")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048 if ON_GPU else 12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    with fast_math(), torch._dynamo.config.patch(COMPILING):
        if given.what == "compile":
            parts = PARTS if given.part is None else (PARTS[given.part],)
            compile_parts(given.peer, sum(parts, ()), given.rows, given.length)
            return
        machine = Machine.here(DEVICE, SETUP.dtype)
        sheet = Sheet(given.out, machine) if given.out else None
        race = Race(given.size, given.rows, given.length, given.tuned, sheet)
        for name in given.providers:
            race.prepare(name)
            if given.what == "profile":
                race.profile(name)
                race.watches.pop(name)
        for _, name in take_turns(race.watches, given.rounds):
            race.turn(name)
        if race.watches:
            race.tell()


if __name__ == "__main__":
    main()
