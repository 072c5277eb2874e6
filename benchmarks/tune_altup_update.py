"""How to cut the kernels of the fused update: each configuration is checked against float32, then timed.

    PYTHONPATH=src python3 benchmarks/tune_altup_update.py

The last lines are the quickest configurations, to be written into `altup/kernels/altup_update/triton.py`.
Under TRITON_INTERPRET=1 it runs on a CPU at a toy size and times nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from altup.kernels import altup_update_reference
from altup.kernels.altup_update import altup_update
from altup.kernels.altup_update import triton as kernels
from altup.kernels.launch import Config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOKENS = 37 if INTERPRETED else 32_768
WIDTHS = (24,) if INTERPRETED else (768, 2048)
SETS = 3  # inputs in turn, so that none is found in the cache
REPEATS = 18
ACTIVE = 1

FORWARD = [Config(4, 1), Config(4, 2), Config(8, 1), Config(2, 2), Config(1, 1)]
BACKWARD = {
    2: [
        Config(4, 1, 9),
        Config(4, 1, 6),
        Config(1, 1, 32),
        Config(2, 1, 16),
        Config(8, 1, 4),
        Config(4, 2, 5),
        Config(1, 2, 20),
        Config(4, 1, 8, 2),
        Config(4, 1, 7, 3),
    ],
    4: [
        Config(1, 1, 16),
        Config(1, 1, 12),
        Config(2, 1, 8),
        Config(4, 1, 4),
        Config(4, 1, 3),
        Config(8, 1, 2),
        Config(1, 2, 12),
        Config(4, 1, 4, 2),
        Config(4, 1, 4, 3),
    ],
}
SUMS = [Config(16, 8), Config(16, 16), Config(32, 8), Config(8, 8)]
if INTERPRETED:
    FORWARD, BACKWARD = FORWARD[:2], {K: configs[:2] for K, configs in BACKWARD.items()}


class Inputs:
    """One problem in bfloat16 with room for its results."""

    def __init__(self, K: int, d: int) -> None:
        def blocks(number: int) -> list[Tensor]:
            return [torch.randn(TOKENS, d, device=DEVICE).bfloat16() for _ in range(number)]

        self.x, self.grads = blocks(K), blocks(K)
        (self.y, self.residual) = blocks(2)
        self.P, self.g = torch.randn(K, K, device=DEVICE), torch.randn(K, device=DEVICE)
        self.new, self.dx = ([torch.empty_like(x) for x in self.x] for _ in range(2))
        self.dy, self.dP, self.dg = (torch.empty_like(t) for t in (self.y, self.P, self.g))

    def forward(self) -> None:
        kernels.forward(self.new, self.x, self.y, None, self.P, self.g, ACTIVE)

    def backward(self) -> None:
        given = self.grads, self.x, self.y
        kernels.backward(self.dx, self.dy, self.dP, self.dg, *given, None, self.P, self.g, ACTIVE)

    def both(self, residual: bool) -> None:
        """As a model does it: the operator, its gradient, and fresh memory for both."""
        inputs = [t.requires_grad_() for t in (*self.x, self.y, self.residual, self.P, self.g)]
        if not residual:
            inputs.pop(len(self.x) + 1)
        added = self.residual if residual else None
        new = altup_update(self.x, self.y, self.P, self.g, ACTIVE, added, implementation="triton")
        torch.autograd.grad(new, inputs, self.grads)

    def exact(self) -> tuple[list[Tensor], list[Tensor]]:
        """What forward and backward should give, in float32."""
        x, y, P, g = (t.float().clone().requires_grad_() for t in (torch.stack(self.x), self.y, self.P, self.g))
        new = altup_update_reference(x, y, P, g, ACTIVE)
        dx, *others = torch.autograd.grad(new, (x, y, P, g), torch.stack(self.grads).float())
        return list(new.detach()), [*dx, *others]


def error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative distance; NaN counts as the largest."""
    distances = [float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return max(distance if distance == distance else float("inf") for distance in distances)


def milliseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Median time on the device. A pause goes ahead: launches wait for the device, and never it for them."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)
    pairs = []
    for run in itertools.islice(itertools.cycle(runs), REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def copy_speed() -> float:
    """Bytes read and written a second by a large copy."""
    source, target = (torch.empty(2**30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * source.numel() / milliseconds([lambda: target.copy_(source)] * SETS) * 1e3


class Case:
    """One K and d: inputs in turn, and the results of the first of them in float32."""

    def __init__(self, K: int, d: int, speed: float) -> None:
        torch.manual_seed(0)
        self.K, self.d, self.speed = K, d, speed
        self.sets = [Inputs(K, d) for _ in range(SETS)]
        first = self.sets[0]
        self.exact = dict(zip(("forward", "backward"), first.exact(), strict=True))
        self.results = {"forward": first.new, "backward": [*first.dx, first.dy, first.dP, first.dg]}

    def measure(self, part: str, what: str) -> float:
        """Check, time and print forward or backward as it is configured now; infinity where it is wrong."""
        for tensor in self.results[part]:
            tensor.fill_(float("nan"))
        getattr(self.sets[0], part)()
        distance = error(self.results[part], self.exact[part])
        if distance > 5e-3:
            print(f"{self.K} {self.d:5d}  {part:20s} {what} is WRONG by {distance:.1e}: not timed")
            return float("inf")
        blocks = 2 * self.K + 1 if part == "forward" else 3 * self.K + 2
        return self.time(part, what, [getattr(inputs, part) for inputs in self.sets], blocks)

    def measure_both(self) -> None:
        for residual in (False, True):
            runs = [partial(inputs.both, residual) for inputs in self.sets]
            what = "both with residual" if residual else "both"
            self.time(what, "through autograd", runs, 5 * self.K + (5 if residual else 3))

    def time(self, part: str, what: str, runs: Sequence[Callable[[], object]], blocks: int) -> float:
        if INTERPRETED:
            runs[0]()
            print(f"{self.K} {self.d:5d}  {part:20s} {what:28s} not timed")
            return 0.0
        ms = milliseconds(runs)
        moved = blocks * TOKENS * self.d * 2 / ms * 1e3
        rates = f"{moved / 1e12:5.2f} TB/s  {moved / self.speed:4.0%}"
        print(f"{self.K} {self.d:5d}  {part:20s} {what:28s} {ms:7.4f} ms  {rates}")
        return ms


def use_interpreter() -> None:
    if INTERPRETED:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from tests.kernels.interpreter import repair

        repair()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50, help="try no further configuration after this long")
    limit = time.perf_counter() + parser.parse_args().seconds
    use_interpreter()
    speed = 0.0
    if not INTERPRETED:
        speed = copy_speed()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {speed / 1e12:.2f} TB/s")
    print("K     d  pass                 (warps, vectors, programs, stages)")
    for K in BACKWARD:
        total: dict[str, dict[Config, float]] = {"forward": {}, "backward": {}, "sums": {}}
        for d in WIDTHS:
            case = Case(K, d, speed)
            for part, table, configs in (
                ("forward", kernels.FORWARD, FORWARD),
                ("backward", kernels.BACKWARD, BACKWARD[K]),
            ):
                for config in configs:
                    if time.perf_counter() < limit:
                        table[K] = config
                        ms = case.measure(part, str(tuple(config)))
                        total[part][config] = total[part].get(config, 0.0) + ms
                table[K] = min(total[part], key=total[part].__getitem__, default=table[K])
            for config in SUMS:
                kernels.COEFFICIENTS = config
                ms = case.measure("backward", f"with sums by {tuple(config)[:2]}")
                total["sums"][config] = total["sums"].get(config, 0.0) + ms
            kernels.COEFFICIENTS = min(total["sums"], key=total["sums"].__getitem__)
            case.measure_both()
            del case
        for part, found in total.items():
            print(f"K={K}, {part}, quickest first:", *sorted(found, key=found.__getitem__)[:3])
    if time.perf_counter() > limit:
        print("time was over: some configurations were left out")


if __name__ == "__main__":
    main()
