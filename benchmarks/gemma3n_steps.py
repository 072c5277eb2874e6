"""Beside `altup bench gemma3n`: training steps by the clock, in turns; the compiler's cache; profiles.

    python benchmarks/gemma3n_steps.py compile --peer hf           # a minute or two, into TORCHINDUCTOR_CACHE_DIR
    python benchmarks/gemma3n_steps.py tune                        # tiles of FlexAttention, for the peer with it
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
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Provider, Setup, Work, distance
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
# Of adapters alone the first layer is a graph of its own: nothing before it has a gradient.
MORE_PARTS = {"all": (), "lora": ((1,),)}
# Tiles of FlexAttention: forward rows, keys, stages, warps; backward M1, N1, M2, N2, stages, warps. The first are
# those that PyTorch 2.11 takes on Hopper for heads of 256.
FLEX_TILES = (
    ((64, 32, 3, 4), (64, 64, 64, 64, 2, 4)),
    ((128, 64, 2, 8), (64, 64, 64, 64, 1, 8)),
    ((64, 64, 2, 4), (64, 64, 64, 64, 2, 8)),
    ((128, 32, 3, 8), (32, 64, 64, 32, 2, 4)),
    ((64, 64, 2, 8), (32, 64, 64, 32, 2, 8)),
    ((128, 32, 2, 4), (32, 32, 32, 32, 2, 4)),
)
FORWARD = tuple(f"fwd_{name}" for name in ("BLOCK_M", "BLOCK_N", "num_stages", "num_warps"))
BACKWARD = tuple(
    f"bwd_{name}" for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
)
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


def begin(state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """For a layer whose input has a gradient, as if adapters stood before it."""
    return state.detach().requires_grad_()


def compile_part(
    peer: str, group: tuple[int, ...], rows: int, length: int, size: str = "E2B", tuned: str = "all"
) -> None:
    """A group of layers; the empty one is the head, with all its words."""
    models = case.Models(SETUP, size)
    deep = case.SHAPES[size] if group else case.SHALLOW
    models.fields = {**({} if ON_GPU else case.QUICK), **FEW, **deep}
    if not group:
        models.fields.pop("vocab_size", None)
    whole = models.whole()
    for index, layer in enumerate(whole.model.layers):
        if index not in group:
            layer.mlp = nn.Identity()  # most of its weights
    model = case.adapted(whole, tuned).train()
    if group:
        compile_layers(model, **COMPILER)
    else:
        case.compiled_layers(model, **COMPILER)
    for index, layer in enumerate(model.model.layers):
        if index not in group:
            before = tuned == "lora" and index < min(group, default=len(model.model.layers))
            layer._compiled_call_impl, layer.forward = None, begin if before else pass_on
    run = case.with_flex(model) if peer == "flex" else model
    ids = models._ids(rows, length) % (FEW.get("vocab_size") or case.QUICK["vocab_size"])
    run(input_ids=ids, labels=ids).loss.backward()
    synchronize(DEVICE)
    del models, whole, model, run
    free()


def compile_parts(peer: str, groups: Sequence[tuple[int, ...]], *shape: Any) -> None:
    """One group after the other."""
    for group in groups:
        compile_part(peer, group, *shape)
        say(f"{peer} {group or 'head'}")


def try_flex(tiles: Any, rows: int, length: int, repetitions: int = 3) -> dict[str, float]:
    """The shortest of some forward and backward passes of a sliding layer's attention, ms; and how far they are
    from float32."""
    config = case.text_config(**({} if ON_GPU else case.QUICK))
    config._attn_implementation = "flex_attention"
    masks: Any = case.block_masks(SimpleNamespace(config=config, device=DEVICE), torch.Size((rows, length)))
    options: Any = {**dict(zip(FORWARD, tiles[0], strict=True)), **dict(zip(BACKWARD, tiles[1], strict=True))}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = masks["sliding_attention"]
        return flex_attention(q, k, v, None, mask, scale=1.0, enable_gqa=True, kernel_options=options)

    run: Any = torch.compile(attend, dynamic=False, **COMPILER)
    torch.manual_seed(0)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [
        (0.25 * torch.randn(rows, length, n, config.head_dim, device=DEVICE)).to(SETUP.dtype).transpose(1, 2)
        for n in heads
    ]
    inputs = [x.requires_grad_() for x in inputs]
    upstream = torch.randn_like(inputs[0])
    gradients: Any = partial(torch.autograd.grad, inputs=inputs, grad_outputs=upstream)
    watch = Stopwatch(Work(lambda i: run(*inputs), gradients), DEVICE)
    watch.start_up()
    watch.warm_up()
    for _ in range(repetitions):
        watch.burst()
    places = torch.arange(length, device=DEVICE)
    back = places[:, None] - places
    exact = [x.detach().float().requires_grad_() for x in inputs]
    seen = (back >= 0) & (back < config.sliding_window)
    q, k, v = exact
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
    wanted = torch.autograd.grad(want, exact, upstream.float())
    out = run(*inputs)
    return {
        **{mode: min(values) for mode, values in watch.samples.items()},
        "output": distance(out, want),
        "gradient": distance(gradients(out), wanted),
    }


def best_tiles(found: dict[Any, dict[str, float]]) -> dict[str, int]:
    """Kernel options of the fastest forward and the fastest backward pass, by tiles and what `try_flex` found."""
    right = {t: times for t, times in found.items() if times["output"] < 2e-2 and times["gradient"] < 2e-2}
    if not right:
        return {}
    forward, _ = min(right, key=lambda t: right[t]["forward"])
    _, backward = min(right, key=lambda t: right[t]["backward"])
    return {**dict(zip(FORWARD, forward, strict=True)), **dict(zip(BACKWARD, backward, strict=True))}


def tune(rows: int, length: int) -> dict[str, int]:
    found = {}
    for tiles in FLEX_TILES:
        try:
            found[tiles] = try_flex(tiles, rows, length)
            say(f"{tiles}: {found[tiles]}")
        except Exception as error:  # tiles that need more shared memory than there is
            say(f"{tiles}: {type(error).__name__}: {str(error)[-200:]}")
    best = best_tiles(found)
    say(f"best: {best}")
    return best


def on_a_cpu(models: case.Models, rows: int, length: int, tuned: str) -> dict[str, Provider]:
    """The same names, without kernels and Inductor."""
    peers: dict[str, case.Prepare] = {
        "hf layers compiled": partial(case.compiled_layers, **COMPILER),
        "hf flex layers compiled": partial(case.flexible, **COMPILER),
    }
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
        self.losses: dict[str, float] = {}

    def prepare(self, name: str) -> None:
        free()
        provider = self.providers[name]
        torch._dynamo.utils.counters.clear()
        watch = Stopwatch(provider.build(), DEVICE)
        seconds = watch.start_up()
        watch.warm_up()
        peak = watch.peak_bytes()
        self.losses[name] = self._loss(watch)
        counts = torch._dynamo.utils.counters
        found = {name: counts["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
        graphs = counts["stats"]["unique_graphs"]
        say(
            f"{name}: first step {seconds:.1f} s, {(peak or 0) / GIB:.2f} GiB, {graphs} graphs compiled, {found}, "
            f"loss {self.losses[name]:.5f}"
        )
        if self.sheet is not None and peak is not None:
            self.sheet.add(_number(self.problem, provider, "step", "GiB", peak / GIB))
        self.watches[name], self.clock[name] = watch, []

    def _loss(self, watch: Stopwatch) -> float:
        loss: torch.Tensor = watch.work.forward(0)
        value = loss.item()
        assert watch.work.backward is not None
        watch.work.backward(loss)
        return value

    def drop(self, name: str) -> None:
        """What it holds, a recorded step above all. Its times stay."""
        self.watches.pop(name, None)
        free()

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
                row = _spread(self.problem, self.providers[name], "step", "ms", spread)
                self.sheet.add(replace(row, note=self._note(name)))

    def _note(self, name: str) -> str:
        note = f"by the clock, bursts of {BURST} steps"
        return f"{note}, {json.dumps(case.FLEX)}" if "flex" in name and case.FLEX else note

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "tune", "race", "profile"))
    parser.add_argument("providers", nargs="*", default=["hf eager", "altup"], help="as `altup bench` names them")
    parser.add_argument("--peer", choices=("hf", "flex"), default="hf", help="what `compile` compiles")
    parser.add_argument("--part", type=int, choices=range(len(PARTS)), help="of `compile`; both by default")
    parser.add_argument("--size", choices=tuple(case.SHAPES), default="E2B")
    parser.add_argument("--tuned", choices=tuple(case.TUNED), default="all", help="which weights")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048 if ON_GPU else 12)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--flex", type=json.loads, default={}, help="kernel options of FlexAttention, JSON")
    parser.add_argument("--out", type=Path, help="CSV that rows are added to")
    given = parser.parse_args()
    case.FLEX.update(given.flex)
    with fast_math(), torch._dynamo.config.patch(COMPILING):
        if given.what == "tune":
            tune(given.rows, given.length)
            return
        if given.what == "compile":
            parts = PARTS if given.part is None else (PARTS[given.part],)
            groups = (*sum(parts, ()), *MORE_PARTS[given.tuned])
            compile_parts(given.peer, groups, given.rows, given.length, given.size, given.tuned)
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
