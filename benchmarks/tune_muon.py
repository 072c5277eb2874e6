"""Muon's update of a T5 base's weights by matrix, by head and by block: time, kernels, error, and configurations.

    python benchmarks/tune_muon.py
    TRITON_INTERPRET=1 python benchmarks/tune_muon.py    # toy sizes, checked and not timed

The weights are those of 36 attentions, 24 feed-forwards and two tables, with random gradients. An update is
replayed as a CUDA graph. `error` is how far some weights are from the definition in float64, relative to how far
they went; their gradients are a matrix of rank 20 and noise.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tune_altup_update import use_interpreter
from tuning import DEVICE, INTERPRETED, distance, milliseconds

from altup.kernels.cuda_graph import record, warm_up
from altup.kernels.muon import gram, orthogonalized, scale_of
from altup.nn import Attention, GatedFeedForward
from altup.training.optimizers.build import blocks_of, build_optimizer
from altup.training.optimizers.config import OptimizerConfig

WIDTH, HEADS, HIDDEN, LAYERS, PIECES = (64, 4, 128, 1, 320) if INTERPRETED else (768, 12, 2048, 12, 32128)
RATE = 0.01
# Tiles, warps, stages and steps of the kernel for symmetric products.
CONFIGURATIONS = [(128, 4, 3, 64), (128, 8, 3, 64), (128, 4, 4, 64), (128, 8, 4, 64), (128, 4, 4, 32)]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = nn.Sequential(
            *(Attention(WIDTH, HEADS, WIDTH // HEADS) for _ in range(3 * LAYERS)),
            *(GatedFeedForward(WIDTH, HIDDEN) for _ in range(2 * LAYERS)),
            *(nn.Embedding(PIECES, WIDTH) for _ in range(2)),
        )
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    return model


def error(muon_by: str) -> float:
    """The largest of some weights', after one step from momenta of zero."""
    model = build()
    blocks = blocks_of(model, muon_by)
    some = [*model[0].parameters(), *model[3 * LAYERS].parameters()]
    for p in some:
        low_rank = torch.randn(p.shape[0], 20, device=DEVICE) @ torch.randn(20, p.shape[1], device=DEVICE)
        p.grad = 1e-3 * (low_rank + torch.randn_like(p))
    before = [p.detach().double().cpu() for p in some]
    config = OptimizerConfig(optimizer="muon", lr=RATE, muon_by=muon_by)
    build_optimizer(config, model, lr=torch.tensor(RATE, device=DEVICE)).step()
    found = []
    for p, old in zip(some, before, strict=True):
        block = blocks.get(p)
        update = scale_of(block or p.shape) * orthogonalized(p.grad.double().cpu(), block)  # type: ignore[union-attr]
        expected = -RATE * old.square().mean().sqrt() * update
        found.append(distance(p.detach().double().cpu() - old, expected))
    return max(found)


def profile(replay: Any) -> None:
    """Milliseconds and launches of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            times[event.name] += event.time_range.elapsed_us() / 1000
            launches[event.name] += 1
    for name, took in times.most_common(10):
        print(f"    {took:6.3f} ms {launches[name]:4d}  {name[:90]}")


def time_update(muon_by: str) -> None:
    config = OptimizerConfig(optimizer="muon", lr=RATE, muon_by=muon_by)
    optimizer: Any = build_optimizer(config, build(), lr=torch.tensor(RATE, device=DEVICE))
    run = optimizer.step
    if not INTERPRETED:
        warm_up(run, torch.device(DEVICE))
        run = record(run)
    print(f"by {muon_by}: {milliseconds(run)}, error {error(muon_by):.4f}", flush=True)
    if not INTERPRETED:
        profile(run)


def time_products() -> None:
    """The kernel for symmetric products in several configurations, beside cuBLAS's full products."""
    n, m, k = (2, 128, 256) if INTERPRETED else (48, WIDTH, HIDDEN)
    dtype = torch.float32 if INTERPRETED else torch.float16
    x = torch.randn(n, m, k, device=DEVICE).to(dtype) / k**0.5
    square, tall = torch.bmm(x, x.mT), x.mT.contiguous()
    want: Tensor = 0.1 * torch.bmm(square, square) + 0.2 * square + 0.3 * torch.eye(m, device=DEVICE, dtype=dtype)
    full = [milliseconds(lambda: torch.bmm(square, square)), milliseconds(lambda: torch.bmm(square, x))]
    print(f"cuBLAS: {', '.join(full)}")
    options = {"alpha": 0.1, "beta": 0.2, "gamma": 0.3}
    chosen = gram.TILE, gram.WARPS, gram.STAGES, gram.STEP
    for gram.TILE, gram.WARPS, gram.STAGES, gram.STEP in CONFIGURATIONS:
        found = gram.symmetric_product(square, square, **options)
        problems = ((square, options), (x, {}), (tall, {"tall": True}))
        times = [milliseconds(partial(gram.symmetric_product, given, given, **more)) for given, more in problems]
        print(
            f"tile {gram.TILE} warps {gram.WARPS} stages {gram.STAGES} step {gram.STEP}: {', '.join(times)}, "
            f"error {distance(found, want):.1e}, symmetric {torch.equal(found, found.mT)}", flush=True,
        )  # fmt: skip
    gram.TILE, gram.WARPS, gram.STAGES, gram.STEP = chosen


if __name__ == "__main__":
    if INTERPRETED:
        use_interpreter()
    for rule in ("matrix", "head", "block"):
        time_update(rule)
    time_products()
