"""How to cut the attention kernels: each configuration is checked against float64, then timed.

    PYTHONPATH=src python3 benchmarks/tune_attention.py

The last lines are the quickest configurations, to be written into `altup/kernels/attention/launch.py`.
Under TRITON_INTERPRET=1 it runs on a CPU at a toy size and times nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from altup.kernels.attention import attention, attention_reference, keep_mask, launch
from altup.kernels.attention.forward import forward
from altup.kernels.attention.keys_backward import keys_backward
from altup.kernels.attention.launch import AttentionCall, TileConfig
from altup.kernels.attention.queries_backward import distance_sums, queries_backward

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 1e-2
if INTERPRETED:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.kernels.interpreter import repair

    repair()
WORKERS = 12  # compile at the same time
SEED = 12345

KERNELS = ("forward", "queries", "keys")


class Case(NamedTuple):
    name: str
    batch: int
    heads: int
    tokens: int
    width: int = 64
    causal: bool = False
    beyond: int | None = None
    dropout: float = 0.0
    packed: bool = False
    keys: int | None = None  # of another length: without a bias


if INTERPRETED:
    ENCODER = Case("encoder", 1, 1, 40, 16)
    EDGES = ENCODER._replace(name="encoder, edges", beyond=8)
    DECODER = Case("decoder", 1, 1, 24, 16, causal=True)
    CROSS = Case("cross", 1, 1, 24, 16, keys=40)
    SLIM, SLIM_DECODER, SLIM_CROSS = EDGES, DECODER, CROSS
    FORWARD = QUERIES = KEYS = FEW = [TileConfig(16, 16, 4, 2), TileConfig(32, 16, 4, 2)]
else:
    ENCODER = Case("encoder", 64, 12, 512)
    EDGES = ENCODER._replace(name="encoder, edges", beyond=91)
    DECODER = Case("decoder", 64, 12, 114, causal=True, beyond=91)
    CROSS = Case("cross", 64, 12, 114, keys=512)
    SLIM = Case("slim encoder", 256, 8, 256, 32, beyond=91)
    SLIM_DECODER = Case("slim decoder", 256, 8, 91, 32, causal=True, beyond=91)
    SLIM_CROSS = Case("slim cross", 256, 8, 91, 32, keys=256)
    FORWARD = [
        TileConfig(128, 64, 4, 3),
        TileConfig(128, 64, 4, 3, engine=True),
        TileConfig(128, 64, 4, 3, 168),
        TileConfig(128, 64, 4, 3, 168, engine=True),
        TileConfig(128, 64, 4, 3, 128, engine=True),
        TileConfig(64, 128, 4, 2, engine=True),
        TileConfig(64, 64, 4, 3, engine=True),
        TileConfig(64, 64, 4, 2, 96),
    ]
    QUERIES = [
        TileConfig(64, 64, 4, 2),
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 3, engine=True),
        TileConfig(64, 64, 4, 2, 128, engine=True),
    ]
    KEYS = [
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 3, engine=True),
        TileConfig(64, 64, 4, 3, 168),
        TileConfig(64, 64, 4, 3, 168, engine=True),
        TileConfig(64, 64, 4, 2, 128, engine=True),
        TileConfig(32, 64, 4, 3, 128),
    ]
    FEW = [
        TileConfig(64, 64, 4, 2),
        TileConfig(64, 64, 4, 2, 168),
        TileConfig(64, 64, 4, 3, 168),
        TileConfig(32, 64, 4, 2),
        TileConfig(32, 64, 4, 3, 128),
    ]
SWEEPS = {
    EDGES: {"forward": FORWARD, "queries": QUERIES, "keys": KEYS},
    DECODER: {"keys": FEW},
    CROSS: {"keys": FEW},
    SLIM: {"forward": FORWARD, "queries": QUERIES, "keys": KEYS},
    SLIM_DECODER: {"keys": FEW},
    SLIM_CROSS: {"keys": FEW},
}
OTHERS = [
    EDGES._replace(name="large's encoder, edges", batch=1 if INTERPRETED else 32, heads=2 if INTERPRETED else 16),
    EDGES._replace(name="encoder, edges, dropout 0.1", dropout=0.1),
    EDGES._replace(name="encoder, edges, packed", packed=True),
]


def inputs(case: Case, batch: int) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """q, k, v and, unless there are other keys, by_distance; the gradient of the result; segments."""
    torch.manual_seed(0)
    B, H, N, D = batch, case.heads, case.tokens, case.width
    q, k, v, d_out = (
        torch.randn(B, n, H, D, device=DEVICE, dtype=DTYPE).transpose(1, 2)
        for n in (N, case.keys or N, case.keys or N, N)
    )
    three = [(q * D**-0.5).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    if case.keys is not None:
        return three, d_out, None
    by_distance = torch.randn(H, 2 * N - 1, device=DEVICE)
    if case.beyond is not None:
        distance = torch.arange(2 * N - 1, device=DEVICE) - (N - 1)
        by_distance[:, distance >= case.beyond] = 0.5
        by_distance[:, distance <= -case.beyond] = -0.5
    segments = None
    if case.packed:
        segments = (torch.arange(N, device=DEVICE) * 3 // N).int().expand(B, N).contiguous()
    return [*three, by_distance], d_out, segments


def problem(case: Case, batch: int) -> tuple[AttentionCall, Tensor]:
    (q, k, v, *bias), d_out, segments = inputs(case, batch)
    seed = torch.tensor([SEED], device=DEVICE) if case.dropout else None
    q, k, v = q.detach(), k.detach(), v.detach()
    by_distance = bias[0] if bias else None
    task = AttentionCall(
        q, k, v, by_distance, segments, segments, seed, case.causal, case.dropout, 1.0, case.beyond
    )
    return task, d_out


@cache
def exact(case: Case) -> list[Tensor]:
    """The result and all gradients in float64, for two sequences."""
    tensors, d_out, segments = inputs(case, 2)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    keep = None
    if case.dropout:
        keep = keep_mask(SEED, 2, case.heads, case.tokens, case.tokens, case.dropout).to(DEVICE)
    options: dict[str, Any] = {"causal": case.causal, "query_segments": segments, "key_segments": segments}
    q, k, v, *bias = wide
    by_distance = bias[0] if bias else None
    out = attention_reference(q, k, v, by_distance=by_distance, keep=keep, dropout=case.dropout, **options)
    return [out, *torch.autograd.grad(out, wide, d_out.double())]


def fold(case: Case, d_bias: Tensor) -> Tensor:
    """Sums over each constant part of the bias."""
    if case.beyond is None:
        return d_bias
    distance = torch.arange(d_bias.shape[1], device=DEVICE) - (case.tokens - 1)
    parts = [d_bias[:, distance <= -case.beyond], d_bias[:, distance >= case.beyond]]
    return torch.cat([d_bias[:, distance.abs() < case.beyond], *(p.sum(1, keepdim=True) for p in parts)], 1)


def gradients(task: AttentionCall, d_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    dq, dk, dv = (launch.empty_heads(x) for x in (task.q, task.k, task.v))
    bias_grad = task.by_distance is not None
    pairs, strips = queries_backward(task, d_out, out, lse, bias_grad, dq)
    keys_backward(task, d_out, pairs, dk, dv)
    return [dq, dk, dv, *([] if strips is None else [distance_sums(task, strips)])]


def disagreement(case: Case) -> float:
    """The largest relative error of the result and the gradients, with the tables as they are."""
    task, d_out = problem(case, 2)
    out, lse = forward(task)
    got = [out, *gradients(task, d_out, out, lse)]
    want = exact(case)
    if case.keys is None:
        got[4:], want = [fold(case, got[4])], [*want[:4], fold(case, want[4])]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    return float("nan") if any(error != error for error in errors) else max(errors)


def works(case: Case) -> dict[str, Callable[[], object]]:
    """Each kernel at full size, and the sum that follows."""
    task, d_out = problem(case, case.batch)
    out, lse = forward(task)
    dq, dk, dv = (launch.empty_heads(x) for x in (task.q, task.k, task.v))
    bias_grad = task.by_distance is not None
    pairs, strips = queries_backward(task, d_out, out, lse, bias_grad, dq)
    return {
        "forward": lambda: forward(task),
        "queries": lambda: queries_backward(task, d_out, out, lse, bias_grad, dq),
        "keys": lambda: keys_backward(task, d_out, pairs, dk, dv),
        "sums": lambda: None if strips is None else distance_sums(task, strips),
    }


def milliseconds(work: Callable[[], object], repeat: int = 50) -> float:
    return float("nan") if INTERPRETED else triton.testing.do_bench(work, 10, repeat, return_mode="median")


def jobs() -> Iterator[tuple[Case, str, TileConfig]]:
    for case, kernels in SWEEPS.items():
        for kernel, configs in kernels.items():
            for config in configs:
                yield case, kernel, config


def table(kernel: str, case: Case) -> dict[int, TileConfig]:
    """Where the kernel looks its configuration up."""
    few = case.tokens <= launch.FEW_QUERIES and not INTERPRETED
    keys = launch.KEYS_OF_FEW if few else launch.KEYS
    return {"forward": launch.FORWARD, "queries": launch.QUERIES, "keys": keys}[kernel]


def put(kernel: str, case: Case, config: TileConfig) -> None:
    table(kernel, case)[case.width] = config


def sweep(chosen: dict[tuple[Case, str], TileConfig]) -> None:
    """Times every configuration that is right and notes the quickest of each kernel."""
    best: dict[tuple[Case, str], float] = {}
    for case, kernel, config in jobs():
        before = table(kernel, case)[case.width]
        put(kernel, case, config)
        try:
            error = disagreement(case)
            time_ms = milliseconds(works(case)[kernel]) if error < TOLERANCE else float("inf")
        except triton.TritonError as fault:
            error, time_ms = float("nan"), float("inf")
            print(fault)
        cut = str(tuple(config))
        print(f"{case.name:16s} {kernel:8s} {cut:26s} {time_ms:8.4f} ms   error {error:.1e}", flush=True)
        put(kernel, case, before)
        if time_ms < best.get((case, kernel), float("inf")) or (case, kernel) not in chosen:
            best[case, kernel], chosen[case, kernel] = time_ms, config


def total(case: Case) -> None:
    """The whole of a case, through the public function, beside flash attention without a bias."""
    parts = {name: milliseconds(work) for name, work in works(case).items()}
    (q, k, v, by_distance), d_out, segments = inputs(case, case.batch)
    by_distance.requires_grad_()
    options: dict[str, Any] = {"causal": case.causal, "query_segments": segments, "key_segments": segments}
    options |= {"constant_beyond": case.beyond, "dropout": case.dropout, "implementation": "triton"}

    def ours() -> object:
        out = attention(q, k, v, by_distance=by_distance, **options)
        return torch.autograd.grad(out, (q, k, v, by_distance), d_out)

    def flash() -> object:
        out = F.scaled_dot_product_attention(q, k, v, None, case.dropout, case.causal, scale=1.0)
        return torch.autograd.grad(out, (q, k, v), d_out)

    error = disagreement(case)
    print(
        f"{case.name:28s} {case.batch}×{case.heads}×{case.tokens}×{case.width}: "
        + " + ".join(f"{name} {ms:.3f}" for name, ms in parts.items())
        + f" = {sum(parts.values()):.3f} ms; in all {milliseconds(ours, 100):.3f} ms; "
        f"flash without bias {milliseconds(flash, 100):.3f} ms; error {error:.1e}",
        flush=True,
    )


def compile_share(worker: int) -> None:
    """Compiles every WORKERS-th configuration, for the cache on disk."""
    for number, (case, kernel, config) in enumerate(jobs()):
        if number % WORKERS == worker:
            put(kernel, case, config)
            try:
                works(case._replace(batch=1))[kernel]()
            except triton.TritonError:
                continue  # told when its turn to be timed comes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, help="only compile this worker's share")
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compile_share(arguments.compile)
        return
    start = time.monotonic()
    if not INTERPRETED:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
        command = [sys.executable, __file__, "--compile"]
        workers = [subprocess.Popen([*command, str(n)]) for n in range(WORKERS)]
        failed = sum(worker.wait() != 0 for worker in workers)
        print(f"compiled in {time.monotonic() - start:.0f} s, {failed} of {WORKERS} workers failed", flush=True)
    chosen: dict[tuple[Case, str], TileConfig] = {}
    sweep(chosen)
    for case in (ENCODER, EDGES, DECODER, SLIM, *OTHERS):
        for kernel in KERNELS:
            config = chosen.get((case, kernel))
            if config is not None:
                put(kernel, case, config)
        total(case)
    for (case, kernel), config in chosen.items():
        print(f"{case.name}: {kernel} {config}")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
