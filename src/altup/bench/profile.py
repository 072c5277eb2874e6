"""Where a repetition's time on the device goes: its kernels by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

KINDS = {  # of kernels, by what their names hold: the first that fits
    "attention": ("flash", "fmha", "sdpa", "flex", "queries_kernel", "keys_kernel", "attend"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "gemv"),
    "compiled": ("triton_",),
    "copies": ("copy", "Copy", "Memcpy", "Memset", "Cat", "FillFunctor"),
    "reductions": ("reduce_kernel", "SoftMax", "softmax"),
    "optimizer": ("multi_tensor", "adafactor", "adam"),
    "kernels of altup": ("_kernel", "_rows"),
}
SHOWN = 25  # kernels


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "others")


def print_profile(title: str, run: Callable[[], object], device: torch.device) -> None:
    """One repetition: milliseconds of each kind, then the longest kernels. Nothing on a CPU."""
    if device.type != "cuda":
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    events = [(e.key, e.device_time_total / 1000, e.count) for e in profile.key_averages() if e.device_time_total]
    kinds: dict[str, float] = defaultdict(float)
    for name, ms, _ in events:
        kinds[kind_of(name)] += ms
    print(f"{title}: {sum(kinds.values()):.2f} ms of kernels")
    for kind, ms in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{ms:9.3f} ms  {kind}")
    for name, ms, count in sorted(events, key=lambda event: -event[1])[:SHOWN]:
        print(f"{ms:9.3f} ms {count:5d} × {name[:110]}")
