"""This machine: names of its devices, their peaks, versions of what runs on it, and bfloat16 on its CPU.

Some virtual machines advertise AMX and trap on it: a product of bf16 matrices then ends the process with "Illegal
instruction". Neither the kernel nor torch can tell; only trying it in a separate process can. oneDNN takes other
instructions where an environment variable says so, which it reads at the first product.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path

from altup.core.errors import UserError

# Dense bf16 FLOP/s from the makers' data sheets, by a part of the device's name; the first that fits counts.
PEAK_BF16 = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
PRECISIONS = ("bf16", "fp32")  # of a model that is run
TRAINING_PRECISIONS = ("bf16", "fp8", "fp32")
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_BF16"  # the newest instructions before AMX
# A product whose left factor has NaN beside it in memory. oneDNN with AMX reads that too, where a row does not end
# with a tile of 16 numbers, and multiplies it by zero.
BF16_TRY = """
import torch
x = torch.full((64, 64), float("nan")).bfloat16()
x[:, :33] = 1
raise SystemExit(3 * bool((x[:, :33] @ torch.ones(33, 64).bfloat16() != 33).any()))
"""
BF16_SECONDS = 180


def peak_flops(name: str) -> float | None:
    """Peak bf16 FLOP/s of a GPU by its name, None where we do not know it."""
    return next((peak for part, peak in PEAK_BF16.items() if part.lower() in name.lower()), None)


def device_name() -> str:
    """The GPU that a run would use, or the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """The name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that a process may still take: of this machine, of its container (cgroup 2), or of `ulimit -v`."""
    pages = os.sysconf("SC_PAGE_SIZE")
    found = [os.sysconf("SC_AVPHYS_PAGES") * pages]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")] or found
    with contextlib.suppress(OSError, ValueError):  # a container without a limit says `max`
        folder = Path("/sys/fs/cgroup")
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        found.append(int((folder / "memory.max").read_text(encoding="utf-8")) - used)
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * pages
        if limit != resource.RLIM_INFINITY:
            found.append(limit - taken)
    return max(0, min(found))


def installed(package: str) -> str | None:
    """The version of a package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """What results were obtained with: altup, Python, torch, transformers, and the GPU if there is one."""
    import torch
    import transformers

    import altup

    found = {
        "altup": altup.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
    return found


def bf16_fault(environment: dict[str, str] | None = None) -> str | None:
    """What is wrong with a bf16 product on the CPU, tried in a process of its own; None if nothing is."""
    done = subprocess.run(
        [sys.executable, "-c", BF16_TRY],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        timeout=BF16_SECONDS,
        check=False,
    )
    if done.returncode < 0:
        return f"crashes ({signal.Signals(-done.returncode).name})"
    return "counts numbers that lie beside a matrix" if done.returncode == 3 else None


@functools.cache
def make_bf16_safe() -> str | None:
    """Let this process and its children multiply bf16 matrices on the CPU, and rightly.

    Returns a sentence about what was changed, or None. Call it before the first product.
    """
    if ISA_VARIABLE in os.environ:  # set by the user, or by a parent process that has tried
        return None
    fault = bf16_fault()
    if fault is None:
        return None
    if (still := bf16_fault({ISA_VARIABLE: SAFE_ISA})) is not None:
        raise UserError(f"bf16 on this CPU {still} with any instructions; take --precision fp32")
    os.environ[ISA_VARIABLE] = SAFE_ISA
    return f"bf16 on this CPU {fault} with the newest instructions; {ISA_VARIABLE}={SAFE_ISA} is set"


def ensure_bf16(device: str) -> None:
    """Every verb calls this before it computes in bf16: on a CPU it tries a product and prints what it changed."""
    if device == "cpu" and (text := make_bf16_safe()):
        print(text, file=sys.stderr)
