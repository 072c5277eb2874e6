"""Beside `altup bench gemma3n`: torch.compile's cache filled from several processes, and where a step's time goes.

    python benchmarks/gemma3n_prepare.py compile     # then altup bench gemma3n --where size=E2B --where batch=4
    python benchmarks/gemma3n_prepare.py profile

Layers of E2B make eight graphs, forward and backward, for each provider. One process compiles them one after the
other; here each process takes two, with the other layers passing their state on, and a few GiB of the GPU. The
cache (`TORCHINDUCTOR_CACHE_DIR`) then serves the benchmark, whose layers are the same code on the same shapes.

Without a GPU both run at toy sizes, to see that they work.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from altup.bench.cases import gemma3n as case
from altup.bench.problem import Setup
from altup.bench.runner import COMPILING, fast_math
from altup.models.stack import compile_layers

ROWS, LENGTH = 4, 2048
# Sliding and full attention of: dense layers, sparse ones, the last that make keys, those that share them.
GROUPS = ((10, 14), (0, 4), (18, 20), (19, 24))
KINDS = {  # of kernels, by what their names hold: the first that fits
    "attention": ("flash", "fmha"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "gemv"),
    "kernels of altup": ("_forward_kernel", "_backward_kernel", "_sums_kernel", "_rows"),
    "compiled": ("triton_",),
    "norms": ("layer_norm", "rms_norm", "GammaBeta"),
    "copies": ("copy", "Copy", "Memcpy", "Memset", "Cat", "FillFunctor"),
    "reductions": ("reduce_kernel", "SoftMax", "softmax"),
}


def prepares(on_gpu: bool) -> dict[str, case.Prepare]:
    """How each provider is made ready; a CPU only traces, and has no FlexAttention that trains."""
    options = {} if on_gpu else {"backend": "aot_eager"}
    kind = "triton" if on_gpu else "plain"
    made: dict[str, case.Prepare] = {
        "hf": lambda model: compile_layers(model, **options),
        "ours": lambda model: compile_layers(case.accelerate(model, implementation=kind), **options),
    }
    if on_gpu:
        made["flex"] = case.flexible
    return made


def build(on_gpu: bool, vocabulary: int | None) -> case.Models:
    device = torch.device("cuda" if on_gpu else "cpu")
    models = case.Models(Setup(device, False, compiles=on_gpu, runs_triton=on_gpu), "E2B")
    if not on_gpu:
        models.fields = {**models.fields, **case.QUICK}
    elif vocabulary is not None:
        models.fields = {
            **models.fields, "vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary,
        }  # fmt: skip
    return models


def pass_on(state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return state


def compile_some(name: str, indices: Iterable[int], on_gpu: bool) -> None:
    begun = time.perf_counter()
    models = build(on_gpu, 1024)
    whole = models.whole()
    others = [index for index in range(len(whole.model.layers)) if index not in indices]
    for index in others:
        whole.model.layers[index].mlp = nn.Identity()  # most of its weights
    model = prepares(on_gpu)[name](case.adapted(whole, "all").train())
    for index in others:
        layer = model.model.layers[index]
        layer._compiled_call_impl, layer.forward = None, pass_on
    ids = models._ids(ROWS, LENGTH if on_gpu else 12)
    with fast_math(), torch._dynamo.config.patch(COMPILING):
        model(input_ids=ids, labels=ids).loss.backward()
    print(f"{name} {tuple(indices)}: {time.perf_counter() - begun:.1f} s", flush=True)


def compile_all(names: Iterable[str], on_gpu: bool) -> None:
    """Children are forked, which spares them the imports; nothing has touched the GPU before."""
    pids = []
    for name in names:
        for indices in GROUPS:
            if pid := os.fork():
                pids.append(pid)
                continue
            try:
                compile_some(name, indices, on_gpu)
            finally:
                os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)


def profile(on_gpu: bool) -> None:
    """A step's kernels, Hugging Face's and ours."""
    models = build(on_gpu, None)
    kind = "triton" if on_gpu else "plain"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    for name, prepare in (
        ("hf eager", case.as_it_is),
        ("altup", lambda model: case.accelerate(model, implementation=kind)),
    ):
        work = models._step(ROWS, LENGTH if on_gpu else 12, "all", prepare)

        def run(work: Any = work) -> None:
            work.backward(work.forward(0))

        with fast_math():
            run()
            run()
            with torch.profiler.profile(activities=[activity]) as seen:
                run()
                if on_gpu:
                    torch.cuda.synchronize()
        show(name, [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count, e.key)
                    for e in seen.key_averages()])  # fmt: skip
        del work, run
        if on_gpu:
            torch.cuda.empty_cache()


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
    parser.add_argument("what", choices=("compile", "profile"))
    parser.add_argument(
        "--only", action="append", choices=("hf", "ours", "flex"), help="providers; all by default"
    )
    given = parser.parse_args()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that asking does not touch the GPU before the fork
    on_gpu = torch.cuda.is_available()
    if given.what == "profile":
        profile(on_gpu)
    else:
        compile_all(given.only or list(prepares(on_gpu)), on_gpu)


if __name__ == "__main__":
    main()
