"""What `altup.widen` costs: forward and backward of a Llama-shaped model, dense and widened, in one run.

    PYTHONPATH=src python3 benchmarks/widen_llama.py                  # ~1B, bfloat16, batch 4 of 2048, a CUDA GPU
    PYTHONPATH=src python3 benchmarks/widen_llama.py --size tiny      # seconds on a CPU: checks, times nothing

The two take turns, so that a clock that drifts drifts for both. `ratio` is widened over dense, `step_gib` the peak
of a step above what was allocated before it: activations, gradients and temporaries (0 on a CPU, where it is not
measured).
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def build(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=4096, use_cache=False)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model.to(dtype).train()


def compiled(model: Any, mode: str) -> Any:
    """The model with each layer compiled, compiled whole, or as it is."""
    if mode == "layers":
        for layer in model.model.layers:
            layer.compile()
    return torch.compile(model) if mode == "model" else model


def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def timed(model: Any, ids: torch.Tensor) -> float:
    """Milliseconds of one step."""
    if ids.device.type != "cuda":
        start = time.perf_counter()
        step(model, ids)
        return 1000 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(model, ids)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def peak_gib(model: Any, ids: torch.Tensor) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--method", default="recycled")
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--compile", choices=("layers", "model", "none"), default="layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    if options.size == "tiny":
        options.batch, options.tokens, options.rounds = 2, 32, 2

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dense = build(options.size, device, dtype)
    wide = altup.widen(copy.deepcopy(dense), options.method, options.k)
    ids = torch.randint(SIZES[options.size]["vocab_size"], (options.batch, options.tokens), device=device)
    models = {"dense": dense, f"{options.method} K={options.k}": wide}
    losses = {name: step(model, ids).item() for name, model in models.items()}
    if max(losses.values()) - min(losses.values()) > 0.02:
        sys.exit(f"the two do not compute the same, so no times are given: {losses}")

    ready = {name: compiled(model, options.compile) for name, model in models.items()}
    for model in ready.values():
        for _ in range(3):
            step(model, ids)
    memory = {name: peak_gib(model, ids) for name, model in ready.items()}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(options.rounds):
        for name, model in ready.items():
            times[name].append(timed(model, ids))

    base = statistics.median(times["dense"])
    rows = []
    for name, model in models.items():
        middle = statistics.median(times[name])
        rows.append(
            {
                "model": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "compile": options.compile,
                "batch": options.batch,
                "tokens": options.tokens,
                "ms": round(middle, 2),
                "ms_spread": round(statistics.stdev(times[name]), 2),
                "ratio": round(middle / base, 4),
                "step_gib": round(memory[name], 2),
                "loss": round(losses[name], 4),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
            }
        )
        print(json.dumps(rows[-1]))
    if options.csv:
        fresh = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if fresh:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
