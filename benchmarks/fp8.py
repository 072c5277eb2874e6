"""What fp8 is worth: each product of T5's layers in bf16 and fp8, the kernels that round, and whole steps.

    PYTHONPATH=src python3 benchmarks/fp8.py --seconds 60 --step base:dense --step large:dense

Under TRITON_INTERPRET=1 it runs on a CPU at toy sizes and times nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tune_altup_update import DEVICE, INTERPRETED, SETS, milliseconds, use_interpreter

from altup.bench.cases.step import METHODS, Models
from altup.bench.problem import Setup, Work, distance
from altup.bench.runner import fast_math
from altup.bench.timing import time_in_turns
from altup.kernels.fp8 import functions, op
from altup.kernels.fp8 import triton as kernels
from altup.kernels.fp8.reference import product_reference

# Tokens, and width before and behind: T5 1.1's layers at batch 64 (base), 32 (large), 8 (xl).
PRODUCTS = {
    "base qkv": (32768, 768, 2304),
    "base o": (32768, 768, 768),
    "base wi": (32768, 768, 4096),
    "base wo": (32768, 2048, 768),
    "base memory": (32768, 768, 18432),
    "base decoder wi": (7296, 768, 4096),
    "large qkv": (16384, 1024, 3072),
    "large o": (16384, 1024, 1024),
    "large wi": (16384, 1024, 5632),
    "xl wi": (4096, 2048, 10240),
}
TOY = {"toy": (64, 32, 48)}
TILES = [(128, 64, 8), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 32, 4), (128, 128, 16)]
ROWS = [256, 512, 1024, 2048]
CHOSEN = kernels.CAST, kernels.GEGLU, kernels.ROW
HIDDEN = {"base": (32768, 2048), "large": (16384, 2816)}


def clock(run: Callable[[], object]) -> float:
    """Milliseconds; in the interpreter it is run once, for nothing."""
    if INTERPRETED:
        run()
        return 0.0
    return milliseconds([run] * SETS)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def time_products(name: str, m: int, k: int, n: int) -> None:
    """Output, gradient of the input, gradient of the weight; and how far sums in the tensor cores are off."""
    x, w, dy = random(m, k), random(n, k) * k**-0.5, random(m, n)
    value, weight = functions.round_values(x), functions.round_weights([w], w.dtype)
    grad = functions.round_gradients([dy])
    factors = {
        "y": (value.q, weight.q, value.scale, weight.scale),
        "dx": (grad.q, weight.transposed, grad.scale, weight.scale),
        "dw": (grad.transposed, value.transposed, grad.scale, value.scale),
    }
    plain: dict[str, Callable[[], Any]] = {
        "y": lambda: x @ w.t(),
        "dx": lambda: dy @ w,
        "dw": lambda: dy.t() @ x,
    }
    cells = []
    for kind, given in factors.items():
        times = [clock(plain[kind])]
        for fast in (True, False):
            times.append(clock(partial(functions.product, *given, torch.bfloat16, fast)))
        cells.append(f"{kind} {times[0]:.3f} → {times[1]:.3f} ({times[2]:.3f})")
    if m * n <= 32768 * 4096:
        want = product_reference(*factors["dw"], torch.float32)
        off = [distance(functions.product(*factors["dw"], torch.bfloat16, fast), want) for fast in (True, False)]
        cells.append(f"dw off by {off[0]:.1e} ({off[1]:.1e})")
    one = torch.ones(1, device=DEVICE)
    cells.append(f"cast dy {clock(lambda: op.cast_op([dy], one, dy.dtype, True)):.3f}")
    cells.append(f"and its largest number {clock(lambda: op.cast_op([dy], None, dy.dtype, True)):.3f}")
    print(f"{name} {m}×{k}×{n} ms bf16 → fast (precise): {'; '.join(cells)}")


def time_kernels(name: str, m: int, n: int) -> None:
    """Milliseconds, and bytes moved a second."""
    h, grad, x = random(m, 2 * n), random(m, n), random(m, 768 if not INTERPRETED else n)
    one = torch.ones((), device=DEVICE)
    low = op.cast_op([x], one.reshape(1), x.dtype, False)[0]
    for kernels.ROW in ROWS:
        ms = clock(lambda: op.geglu_op(h))
        print(f"{name} geglu, {kernels.ROW} numbers a warp: {ms:.3f} ms {_rate(5 * m * n, ms)}")
    for tile in TILES:
        kernels.GEGLU = tile
        ms = clock(lambda: op.geglu_backward_op(grad, h, one, one))
        line = f"{name} {tile} geglu backward {ms:.3f} ms {_rate(11 * m * n, ms)}"
        kernels.CAST = tile
        ms = clock(lambda: op.cast_op([x], one.reshape(1), x.dtype, False))
        line += f"; cast {list(x.shape)} {ms:.3f} ms {_rate(4 * x.numel(), ms)}"
        ms = clock(lambda: op.cast_op([x, x, x], None, x.dtype, True))
        print(f"{line}; three, and their largest {ms:.3f} ms {_rate(18 * x.numel(), ms)}")
    kernels.CAST, kernels.GEGLU, kernels.ROW = CHOSEN
    ms = clock(lambda: op.transpose_op(low))
    print(f"{name} transpose {ms:.3f} ms {_rate(2 * x.numel(), ms)}")


def time_all_kernels() -> None:
    for name, shape in (TOY if INTERPRETED else PRODUCTS).items():
        time_products(name, *shape)
    for name, size in ({"toy": (64, 48)} if INTERPRETED else HIDDEN).items():
        time_kernels(name, *size)


def _rate(moved: int, ms: float) -> str:
    return f"{moved / ms / 1e9:.2f} TB/s" if ms else ""


def build_step(size: str, method: str) -> tuple[torch.device, dict[str, Work]]:
    """The same model in both precisions, compiled and recorded."""
    device = torch.device(DEVICE)
    on_gpu = device.type == "cuda"
    models = Models(Setup(device, not on_gpu, (size,), on_gpu, on_gpu), size if on_gpu else "tiny")
    works = {}
    with fast_math():
        for name in ("bf16", "fp8"):
            begun = time.monotonic()
            works[name] = models.ours(method, compiled=on_gpu, fp8=name != "bf16")
            works[name].forward(0)
            print(f"{size} {method} {name}: ready after {time.monotonic() - begun:.0f} s", flush=True)
    return device, works


def time_step(title: str, device: torch.device, works: dict[str, Work]) -> None:
    with fast_math():
        times = time_in_turns(works, device, rounds=3, burst=4 if device.type == "cuda" else 1)
    middle = {name: statistics.median(values) for name, values in times.items()}
    cells = (f"{name} {ms:.2f} ms, {middle['bf16'] / ms:.3f}×" for name, ms in middle.items())
    print(f"{title}: {'; '.join(cells)}", flush=True)


def show_profile(title: str, run: Any) -> None:
    """Kernels by the time they take together."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    print(f"{title}: {sum(event.device_time_total for event in found) / 1000:.2f} ms of kernels")
    for event in found[:40]:
        print(f"{event.device_time_total / 1000:8.3f} ms {event.count:5d} × {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="nothing is begun later")
    parser.add_argument("--step", action="append", default=[], help="SIZE:METHOD, such as 'base:altup k2'")
    parser.add_argument("--no-kernels", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    if INTERPRETED:
        use_interpreter()
    torch.manual_seed(0)
    if not options.no_kernels:
        time_all_kernels()
    for place, step in enumerate(options.step):
        if time.monotonic() - begun > options.seconds:
            print(f"{step}: no time left")
            continue
        size, method = step.split(":")
        if method not in METHODS:
            parser.error(f"--step {step}: one of {', '.join(METHODS)}")
        device, works = build_step(size, method)
        time_step(step, device, works)
        if place == 0 and device.type == "cuda":
            for name, work in works.items():
                show_profile(f"{step} {name}", work.unrecorded)


if __name__ == "__main__":
    main()
