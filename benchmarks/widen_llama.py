"""What `altup.widen` costs a Llama-shaped model, dense and widened in one run: training steps and writing text.

    PYTHONPATH=src python3 benchmarks/widen_llama.py                  # ~1B, batch 4 of 2048, a CUDA GPU, all cases
    PYTHONPATH=src python3 benchmarks/widen_llama.py --size tiny      # seconds on a CPU: checks, times nothing

| case | is |
|---|---|
| `text` | `generate`, greedy, one prompt of 128 tokens: milliseconds a new token |
| `step` | forward and backward, bfloat16 |
| `step-compiled` | the same, layers compiled |
| `step-fp16` | float16, not compiled |
| `step-fsdp2` | float32 weights sharded over one process, layer by layer, computing in bfloat16 |
| `text-static` | `generate` with a static cache, which transformers compiles and records (minutes) |
| `token` | one new token with a static cache, recorded as a CUDA graph: what the GPU itself needs (not on a CPU) |

The models take turns, so that a clock that drifts drifts for all. `ratio` is widened over dense, `step_gib` the
peak of a step above what was allocated before it: activations, gradients and temporaries (0 on a CPU, where it is
not measured). Rows are written after each case.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import altup

SIZES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CASES = ("text", "step", "step-compiled", "step-fp16", "step-fsdp2", "token", "text-static")
PROMPT, NEW_TOKENS = 128, 32  # of `token`


def build(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """The dense model and the widened ones, by name."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[options.size], max_position_embeddings=4096)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    with torch.device(options.device):
        dense: Any = LlamaForCausalLM(config)
    dense.set_attn_implementation("sdpa")
    dense = dense.to(dtype)
    dense.generation_config.pad_token_id = dense.generation_config.eos_token_id = None
    wide = {f"{m} K={options.k}": altup.widen(copy.deepcopy(dense), m, options.k) for m in options.method}
    return {"dense": dense} | wide


def tokens(options: argparse.Namespace, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(SIZES[options.size]["vocab_size"], shape, device=options.device)


def step(model: Any, ids: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call, host and GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def in_turns(
    works: dict[str, Callable[[], Any]], options: argparse.Namespace, rounds: int
) -> dict[str, list[float]]:
    """Each work's milliseconds in every round, another one first each time."""
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(timed(works[name], options.device))
    return times


def peak_gib(model: Any, ids: Tensor) -> float:
    model.zero_grad(set_to_none=True)
    if ids.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, ids)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return peak / 2**30


def steps(models: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    ids = tokens(options, options.batch, options.tokens)
    losses = {name: step(model.train(), ids).item() for name, model in models.items()}
    if max(losses.values()) - min(losses.values()) > 0.02:
        raise RuntimeError(f"they do not compute the same, so no times are given: {losses}")
    for model in models.values():
        step(model, ids)
        step(model, ids)
    memory = {name: round(peak_gib(model, ids), 2) for name, model in models.items()}
    works = {name: lambda model=model: step(model, ids) for name, model in models.items()}
    times = in_turns(works, options, options.rounds)
    for model in models.values():
        model.zero_grad(set_to_none=True)
    sizes = {"batch": options.batch, "tokens": options.tokens}
    return [
        sizes | {"model": n, "step_gib": memory[n], "loss": round(losses[n], 4), "times": times[n]} for n in models
    ]


def texts(models: dict[str, Any], options: argparse.Namespace, cache: str | None = None) -> list[dict[str, Any]]:
    prompt = tokens(options, 1, PROMPT)

    def write(model: Any) -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            cache_implementation=cache,
        )

    written = {name: write(model.eval()) for name, model in models.items()}
    if cache:  # what is compiled is recorded in the second call
        written = {name: write(model) for name, model in models.items()}
    print({name: bool(torch.equal(text, written["dense"])) for name, text in written.items()}, "same text")
    works = {name: lambda model=model: write(model) for name, model in models.items()}
    times = in_turns(works, options, options.rounds)
    sizes = {"batch": 1, "tokens": options.new_tokens}
    return [sizes | {"model": n, "times": [t / options.new_tokens for t in times[n]]} for n in models]


@torch.no_grad()
def one_token(models: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a replay, for one text and for 32."""
    rows: list[dict[str, Any]] = []
    for batch in (1, 32) if options.device.type == "cuda" else ():
        prompt, new = tokens(options, batch, PROMPT), tokens(options, batch, 1)
        works = {}
        for name, model in models.items():
            cache = StaticCache(config=model.eval().config, max_cache_len=4 * PROMPT)
            model(input_ids=prompt, past_key_values=cache)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    model(input_ids=new, past_key_values=cache)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(input_ids=new, past_key_values=cache)

            def replay(graph: Any = graph, cache: Any = cache) -> None:
                for layer in cache.layers:
                    layer.cumulative_length.fill_(PROMPT)
                for _ in range(NEW_TOKENS):
                    graph.replay()

            works[name] = replay
            replay()
        times = in_turns(works, options, options.rounds)
        sizes = {"batch": batch, "tokens": 1}
        rows += [sizes | {"model": n, "times": [t / NEW_TOKENS for t in times[n]]} for n in models]
    return rows


def sharded(models: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("nccl" if options.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    mesh = dist.init_device_mesh(options.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model in models.values():
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return models


def compile_layers(models: dict[str, Any], wanted: bool) -> None:
    for model in models.values():
        for layer in model.model.layers:
            layer._compiled_call_impl = None
            if wanted:
                layer.compile()


def measure(case: str, models: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    compile_layers(models, case == "step-compiled")
    if case == "text":
        return texts(models, options)
    if case == "text-static":
        return texts(models, options, "static")
    if case == "token":
        return one_token(models, options)
    if case == "step-fsdp2":
        models = sharded(models, options)
    return steps(models, options)


def finish(
    case: str, dtype: torch.dtype, rows: list[dict[str, Any]], parameters: dict[str, int], device: str
) -> None:
    """Milliseconds and ratios, from the times of each round."""
    dense = {row["batch"]: statistics.median(row["times"]) for row in rows if row["model"] == "dense"}
    for row in rows:
        times = row.pop("times")
        middle = statistics.median(times)
        row |= {
            "case": case,
            "dtype": str(dtype).removeprefix("torch."),
            "parameters": parameters[row["model"]],
            "ms": round(middle, 3),
            "ms_spread": round(statistics.stdev(times), 3),
            "ratio": round(middle / dense[row["batch"]], 4),
            "device": device,
            "torch": torch.__version__,
        }
        print(json.dumps(row), flush=True)


FIELDS = (
    "model",
    "parameters",
    "case",
    "dtype",
    "batch",
    "tokens",
    "ms",
    "ms_spread",
    "ratio",
    "step_gib",
    "loss",
    "layers",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--method", nargs="+", default=["recycled", "altup"])
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="instead of the size's own number (16)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="that text and text-static write")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    if options.size == "tiny":
        options.batch, options.tokens, options.rounds = 2, 32, 2
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.cuda.get_device_name() if options.device.type == "cuda" else "cpu"
    low = torch.bfloat16 if options.device.type == "cuda" else torch.float32

    dtypes = {"step-fp16": torch.float16, "step-fsdp2": torch.float32}
    models: dict[str, Any] = {}
    built: torch.dtype | None = None
    failed = False
    for case in options.case:
        dtype = dtypes.get(case, low)
        try:
            if dtype != built:
                models.clear()
                models = build(options, dtype)
                built = dtype
            parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
            rows = measure(case, models, options)
            rows = [row | {"layers": models["dense"].config.num_hidden_layers} for row in rows]
            finish(case, dtype, rows, parameters, device)
        except Exception as error:
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        if options.csv and rows:
            fresh = not options.csv.exists()
            with options.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, (*FIELDS, "device", "torch"))
                if fresh:
                    writer.writeheader()
                writer.writerows(rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
