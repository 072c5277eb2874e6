"""Tests of Triton kernels run on a GPU or, without one, in Triton's interpreter, in a process of their own.

The interpreter (TRITON_INTERPRET=1) is chosen when a kernel is defined, and must not be chosen for other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def runs_kernel(test):
    """Run by `make test-gpu`, and by a test that calls `pass_in_the_interpreter`."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(INTERPRETED, reason="needs a GPU")(test))


def outside_the_interpreter(test):
    return pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")(test)


def pass_in_the_interpreter(file: str) -> None:
    """Run the tests of `file` again, with the kernels interpreted."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def repair() -> None:
    """For numpy 2.4 and later, where int() no longer takes an array of one."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


if INTERPRETED:
    repair()
