"""bfloat16 on this machine's CPU, tried before it is used.

Some virtual machines advertise AMX and trap on it: a product of bf16 matrices then ends the process with "Illegal
instruction". Neither the kernel nor torch can tell; only a try in a process of its own does. oneDNN takes other
instructions where an environment variable says so, which it reads at the first product.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

from altup.core.errors import UserError

VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE = "AVX512_CORE_BF16"  # the newest instructions before AMX
TRY = "import torch; x = torch.randn(64, 64).bfloat16(); (x @ x).sum().item()"
SECONDS = 180


def bf16_crash(environment: dict[str, str] | None = None) -> str | None:
    """The name of the signal that a bf16 product on the CPU dies of, in a process of its own; None if it lives."""
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    return signal.Signals(-done.returncode).name if done.returncode < 0 else None


@functools.cache
def make_bf16_safe() -> str | None:
    """Let this process and its children multiply bf16 matrices on the CPU.

    Gives a sentence about what had to be done, None where nothing had to. Call it before the first product.
    """
    if VARIABLE in os.environ:  # set by the user, or by a parent process that has tried
        return None
    crash = bf16_crash()
    if crash is None:
        return None
    if bf16_crash({VARIABLE: SAFE}) is not None:
        raise UserError(f"bf16 on this CPU crashes ({crash}) with any instructions; take --precision fp32")
    os.environ[VARIABLE] = SAFE
    return f"bf16 on this CPU crashes ({crash}) with the newest instructions; {VARIABLE}={SAFE} is set"


def ensure_bf16(device: str) -> None:
    """What every verb calls before it computes in bf16: on a CPU it is tried, and what had to be done is told."""
    if device == "cpu" and (told := make_bf16_safe()):
        print(told, file=sys.stderr)
