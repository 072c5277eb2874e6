"""What `altup.widen` costs a Llama-shaped model, dense and widened in one run: training steps and writing text.

    PYTHONPATH=src python3 benchmarks/widen_llama.py                  # ~1B, batch 4 of 2048, a CUDA GPU, all cases
    PYTHONPATH=src python3 benchmarks/widen_llama.py --size tiny      # seconds on a CPU: checks, times nothing
    PYTHONPATH=src python3 benchmarks/widen_llama.py --case text-static text --go FILE     # builds, times on GO

| case | is |
|---|---|
| `text` | `generate`, greedy, one prompt of 128 tokens: milliseconds a new token |
| `token-eager` | one new token behind that prompt, launched: what the host needs, without `generate` |
| `step` | forward and backward, bfloat16 |
| `step-compiled` | the same, layers compiled |
| `step-fp16` | float16, not compiled |
| `step-fsdp2` | float32 weights sharded over one process, layer by layer, computing in bfloat16 |
| `text-static` | `generate` with a static cache, which transformers compiles and records (half a minute a model) |
| `token` | one new token with a static cache, recorded as a CUDA graph: what the GPU itself needs (not on a CPU) |

The models take turns, so that a clock that drifts drifts for all. `ratio` is widened over dense, the median of the
ratios in each round, `step_gib` the peak of a step above what was allocated before it: activations, gradients and
temporaries (0 on a CPU, where it is not measured). Rows are written after each case.

Each case is built and then timed. With `--go FILE` all cases are built first, in the order given and model by
model (dense, then as `--method` has them), and what is built is timed once FILE exists. `--warm` only builds.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from turns import Gate, in_words, ratio, say

import altup
from altup.bench.cases.step import share_weights
from altup.bench.runner import TimeIsUp
from altup.bench.timing import synchronize, take_turns

SIZES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tinyllama": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
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
CASES = ("text", "token-eager", "step", "step-compiled", "step-fp16", "step-fsdp2", "token", "text-static")
DTYPES = {"step-fp16": torch.float16, "step-fsdp2": torch.float32}
PROMPT, NEW_TOKENS = 128, 32  # of `token`
LEAST = 3  # rounds, whatever the time limit
TOKENS = 20  # single tokens are timed so many times as often as the rest


@dataclass
class Case:
    """What is timed in turns: `works` are calls by the model's name, of `tokens` new tokens each, `facts` what
    else stands in a model's row. `before` is called before each call, and does not count."""

    name: str
    sizes: dict[str, int]
    tokens: int = 1
    repeat: int = 1
    works: dict[str, Callable[[], Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: Callable[[str], Any] = lambda name: None


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


def in_turns(case: Case, options: argparse.Namespace, seconds: float) -> dict[str, list[float]]:
    """Each work's milliseconds in every round, host and GPU."""
    times: dict[str, list[float]] = {name: [] for name in case.works}
    for work in case.works.values():
        work()
    gc.collect()
    gc.freeze()  # what is collected meanwhile is small
    until = time.perf_counter() + seconds
    for number, name in take_turns(case.works, options.rounds * case.repeat):
        is_first = len({len(values) for values in times.values()}) == 1
        if is_first and number >= LEAST and time.perf_counter() > until:
            break
        case.before(name)
        synchronize(options.device)
        start = time.perf_counter()
        case.works[name]()
        synchronize(options.device)
        times[name].append(1000 * (time.perf_counter() - start))
    gc.unfreeze()
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


def prepare_steps(case: Case, models: dict[str, Any], options: argparse.Namespace) -> None:
    ids = tokens(options, options.batch, options.tokens)
    for name, model in models.items():
        loss = step(model.train(), ids).item()
        wanted = case.facts.get("dense", {}).get("loss", loss)
        if abs(loss - wanted) > 0.02:
            say(f"{case.name}: {name} is not timed, as its loss is {loss:.4f} and not {wanted:.4f}")
            continue
        step(model, ids)
        step(model, ids)
        case.facts[name] = {"step_gib": round(peak_gib(model, ids), 2), "loss": round(loss, 4)}
        case.works[name] = lambda model=model: step(model, ids)


def prepare_texts(case: Case, models: dict[str, Any], options: argparse.Namespace, cache: str | None) -> None:
    prompt = tokens(options, 1, PROMPT)

    def write(model: Any) -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            cache_implementation=cache,
        )

    wanted: Tensor | None = None
    for name, model in models.items():
        begun = time.perf_counter()
        text = write(model.eval())
        for _ in range(2 if cache else 0):  # what is compiled is recorded, then replayed
            text = write(model)
        wanted = text if wanted is None else wanted
        same = int((text == wanted)[0, PROMPT:].long().cumprod(dim=0).sum())
        seconds = time.perf_counter() - begun
        say(f"{case.name}: {name} ready in {seconds:.1f} s, {same} of {options.new_tokens} tokens as dense")
        case.works[name] = lambda model=model: write(model)


@torch.no_grad()
def prepare_eager_tokens(case: Case, models: dict[str, Any], options: argparse.Namespace) -> None:
    prompt, new = tokens(options, 1, PROMPT), tokens(options, 1, 1)
    caches = {name: DynamicCache(config=model.config) for name, model in models.items()}

    def forget(name: str) -> None:
        """All but the prompt."""
        if (more := caches[name].get_seq_length() - PROMPT) > 0:
            caches[name].crop(-more)

    case.before = forget
    for name, model in models.items():
        model.eval()(input_ids=prompt, past_key_values=caches[name])

        @torch.no_grad()
        def write(model: Any = model, cache: Any = caches[name]) -> None:
            model(input_ids=new, past_key_values=cache)

        write()
        case.works[name] = write


@torch.no_grad()
def prepare_tokens(case: Case, models: dict[str, Any], options: argparse.Namespace) -> None:
    """Replays of a graph."""
    batch = case.sizes["batch"]
    prompt, new = tokens(options, batch, PROMPT), tokens(options, batch, 1)
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

        replay()
        case.works[name] = replay


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


def with_compiled_layers(model: Any) -> Any:
    """A model of its own over the same weights."""
    model = share_weights(model)
    for layer in model.model.layers:
        layer.compile()
    return model


def prepare(name: str, models: dict[str, Any], options: argparse.Namespace, cases: list[Case]) -> None:
    """Adds to `cases` at once and fills them model by model: what is ready can be timed at any moment."""
    text = {"batch": 1, "tokens": options.new_tokens}
    if name in ("text", "text-static"):
        cases.append(Case(name, text, options.new_tokens))
        prepare_texts(cases[-1], models, options, "static" if name == "text-static" else None)
    elif name == "token-eager":
        cases.append(Case(name, {"batch": 1, "tokens": 1}, repeat=TOKENS))
        prepare_eager_tokens(cases[-1], models, options)
    elif name == "token":
        for batch in (1, 32) if options.device.type == "cuda" else ():
            cases.append(Case(name, {"batch": batch, "tokens": 1}, NEW_TOKENS))
            prepare_tokens(cases[-1], models, options)
    else:
        cases.append(Case(name, {"batch": options.batch, "tokens": options.tokens}))
        if name == "step-compiled":
            models = {one: with_compiled_layers(model) for one, model in models.items()}
        if name == "step-fsdp2":
            models = sharded(models, options)
        prepare_steps(cases[-1], models, options)


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
    "device",
    "torch",
    "rounds",
    "ratio_error",
)


class Bench:
    """Models by type of number and whether they are sharded, and the file of rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.failed = options, False
        self.models: dict[tuple[torch.dtype, bool], dict[str, Any]] = {}
        on_gpu = options.device.type == "cuda"
        self.low = torch.bfloat16 if on_gpu else torch.float32
        self.about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}

    def run(self, names: list[str], gate: Gate) -> None:
        """Build these cases, then time them."""
        cases: list[Case] = []
        try:
            with gate.building():
                for name in names:
                    self._build(name, cases)
        except TimeIsUp:
            ready = {case.name: list(case.works) for case in cases}
            say(f"building ends; ready: {ready}")
        if self.options.warm:
            return
        gate.wait()
        for i, case in enumerate(cases):
            if "dense" not in case.works:
                say(f"{case.name}: not ready")
                self.failed = True
                continue
            try:
                self._keep(self._rows(case, in_turns(case, self.options, gate.left / (len(cases) - i))))
            except Exception as error:
                self._fail(case.name, error)

    def _build(self, name: str, cases: list[Case]) -> None:
        key = self._key(name)
        try:
            if key not in self.models:
                if self.options.go is None:
                    self.models.clear()
                self.models[key] = build(self.options, key[0])
            prepare(name, self.models[key], self.options, cases)
        except Exception as error:
            self._fail(name, error)

    def _key(self, name: str) -> tuple[torch.dtype, bool]:
        return DTYPES.get(name, self.low), name == "step-fsdp2"

    def _fail(self, name: str, error: Exception) -> None:
        print(f"{name}: {in_words(error)}", file=sys.stderr, flush=True)
        self.failed = True

    def _rows(self, case: Case, times: dict[str, list[float]]) -> list[dict[str, Any]]:
        key = self._key(case.name)
        rows = []
        for name, values in times.items():
            model = self.models[key][name]
            each = [ms / case.tokens for ms in values]
            middle, error = ratio(values, times["dense"])
            rows.append(
                {
                    "model": name,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "case": case.name,
                    "dtype": str(key[0]).removeprefix("torch."),
                    **case.sizes,
                    "ms": round(statistics.median(each), 4),
                    "ms_spread": round(statistics.stdev(each), 4),
                    "ratio": round(middle, 4),
                    **case.facts.get(name, {}),
                    "layers": model.config.num_hidden_layers,
                    **self.about,
                    "rounds": len(each),
                    "ratio_error": round(error, 4),
                }
            )
        return rows

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print(json.dumps(row), flush=True)
        if path := self.options.csv:
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if is_new:
                    writer.writeheader()
                writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--method", nargs="+", default=["altup", "recycled"])
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="instead of the size's own number (16)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="that text and text-static write")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--warm", action="store_true", help="build everything, time nothing")
    Gate.add_flags(parser, build_s=600, time_s=60)
    options = parser.parse_args()
    if options.size == "tiny":
        options.batch, options.tokens, options.rounds = 2, 32, 2
    if options.csv and options.csv.exists() and options.csv.read_text().splitlines()[:1] != [",".join(FIELDS)]:
        parser.error(f"--csv {options.csv}: it has other columns; name another file")
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 64  # all models share the code that is compiled

    bench = Bench(options)
    for names in [options.case] if options.go or options.warm else [[name] for name in options.case]:
        bench.run(names, Gate.of(options))
    sys.exit(bench.failed)


if __name__ == "__main__":
    main()
