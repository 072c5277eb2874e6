"""Gemma 3n's graphs and kernels, compiled into the caches before gemma3n_steps.py times anything."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from turns import in_words, say

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Setup, Work, distance
from altup.bench.runner import COMPILING, fast_math
from altup.bench.timing import Stopwatch, synchronize
from altup.models.stack import compile_layers

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SETUP = Setup(DEVICE, quick=not ON_GPU, compiles=ON_GPU, runs_triton=ON_GPU)
COMPILER: dict[str, Any] = {} if ON_GPU else {"backend": "aot_eager"}
FEW = {"vocab_size": 1024, "vocab_size_per_layer_input": 1024} if ON_GPU else {}  # words, where none are read
# Sliding and full attention of dense layers and sparse ones; the last that make keys, alone and with a reader.
PARTS: tuple[tuple[int, ...], ...] = ((10,), (0,), (14,), (4,), (), (18,), (18, 20), (19,), (19, 24))
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
OPTIONS = "gemma3n_flex.json"  # what `tune` has found, in the compiler's cache


class Shape(NamedTuple):
    """Of a training step."""

    rows: int
    length: int
    size: str = "E2B"
    tuned: str = "all"


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


def run_kernels(shape: Shape) -> None:
    """Ours, on four layers of the same widths; launched, and remade."""
    models = case.Models(SETUP, shape.size)
    models.fields = {**models.fields, **case.SHALLOW}
    for remake in (False, True):
        kernels: Any = partial(case.accelerate, implementation="triton" if ON_GPU else "plain", remake=remake)
        work = models._step(shape.rows, shape.length, shape.tuned, kernels)
        assert work.backward is not None
        work.backward(work.forward(0))
    synchronize(DEVICE)
    del models, work
    free()


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


def permit_flex() -> None:
    """On a CPU, too: FlexAttention's formulas have a backward pass there, its kernels do not."""
    if not ON_GPU:
        torch.nn.attention.flex_attention._validate_device = lambda *given: None


def options_path() -> Path | None:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(folder) / OPTIONS if folder else None


def load_options(given: dict[str, Any]) -> None:
    """FlexAttention's: those given, or what `tune` found."""
    path = options_path()
    case.FLEX.clear()
    case.FLEX.update(given or (json.loads(path.read_text()) if path and path.exists() else {}))
    say(f"FlexAttention's options: {case.FLEX or 'PyTorch’s own'}")


@dataclass(frozen=True)
class Job:
    """`what` is tune, ours, hf or flex; `part` the tiles that are tried, or layers that are compiled."""

    what: str
    part: Any
    shape: Shape
    flex: tuple[tuple[str, Any], ...] = ()

    def run(self) -> tuple[Any, float]:
        """What was found, and seconds."""
        begun = time.perf_counter()
        permit_flex()
        case.FLEX.clear()
        case.FLEX.update(dict(self.flex))
        found = None
        with fast_math(), torch._dynamo.config.patch(COMPILING):
            if self.what == "tune":
                found = try_flex(self.part, *self.shape[:2])
            elif self.what == "ours":
                run_kernels(self.shape)
            else:
                compile_part(self.what, self.part, *self.shape)
        return found, time.perf_counter() - begun

    def __str__(self) -> str:
        return f"{self.what} {self.part or 'head'}" if self.what != "ours" else self.what


def jobs_of(peer: str, shape: Shape) -> Iterator[Job]:
    """The graphs of a peer, what takes longest first. A layer that another group holds too is compiled there."""
    known = (*PARTS, *MORE_PARTS[shape.tuned])
    kept = [one for one in known if not any(one and set(one) < set(other) for other in known)]
    flex = tuple(sorted(case.FLEX.items())) if peer == "flex" else ()
    for group in sorted(kept, key=lambda group: -len(group)):
        yield Job(peer, group, shape, flex)


class Pool:
    """Processes that share the jobs, in the order in which they are given; nothing is begun after `seconds`."""

    def __init__(self, processes: int, seconds: float) -> None:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # which the processes read
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        self._until = time.perf_counter() + seconds
        self._pending: dict[Future[Any], Job] = {}

    def submit(self, jobs: Sequence[Job]) -> list[Future[Any]]:
        futures = [self._pool.submit(Job.run, job) for job in jobs]
        self._pending.update(zip(futures, jobs, strict=True))
        return futures

    def wait(self, futures: Sequence[Future[Any]] | None = None) -> dict[Any, Any]:
        """What these found, by part; all that are left by default."""
        found, left = {}, max(1.0, self._until - time.perf_counter())
        try:
            for future in as_completed(futures or list(self._pending), left):
                job = self._pending.pop(future)
                try:
                    found[job.part], seconds = future.result()
                    say(f"{job}: {seconds:.1f} s {found[job.part] or ''}")
                except Exception as error:  # tiles that need more shared memory than there is, say
                    say(f"FAILED {job}: {in_words(error)}")
        except TimeoutError:
            say(f"time limit; not done: {', '.join(map(str, self._pending.values()))}")
        return found

    def end(self) -> None:
        children = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=not self._pending, cancel_futures=True)
        for child in children if self._pending else ():
            child.kill()


def compile_all(peers: Sequence[str], shape: Shape, processes: int, seconds: float, tunes: bool) -> None:
    """Our kernels and what the peers need. With `tunes` tiles of FlexAttention are tried first, and kept."""
    pool = Pool(processes, seconds)
    tried = pool.submit([Job("tune", one, shape) for one in FLEX_TILES]) if tunes else []
    pool.submit([Job("ours", (), shape)])
    pool.submit([job for peer in peers if peer != "flex" for job in jobs_of(peer, shape)])
    if tried:
        case.FLEX.update(best_tiles(pool.wait(tried)))
        say(f"FlexAttention's best options: {case.FLEX}")
        if path := options_path():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(case.FLEX))
    if "flex" in peers:
        heads = "hf" not in peers  # or that one serves both
        pool.submit([job for job in jobs_of("flex", shape) if job.part or heads])
    pool.wait()
    pool.end()
    say("done")
