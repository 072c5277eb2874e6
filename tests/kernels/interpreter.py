"""Where kernels are tested: on a GPU, or in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 when a kernel is defined, and must not be chosen for other tests.
So it has a pytest run of its own: `TRITON_INTERPRET=1 pytest tests/kernels -m interpreter`. It is slow: give it
shapes of few programs and few tiles.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import library

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
BACKEND = "aot_eager" if INTERPRETED else "inductor"  # of torch.compile

# The checks of opcheck that compile nothing: for an operator without a gradient, or a second variant.
CHEAP_CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")

HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_operator(operator, *given, checks=None):
    """Whether PyTorch finds an `Operator` to be what it takes it for."""
    library.opcheck(operator.registered, given, **({} if checks is None else {"test_utils": checks}))


def runs_kernel(test):
    """Run in the interpreter's run, and by `make test-gpu`."""
    if not INTERPRETED:
        return pytest.mark.gpu(test)
    return pytest.mark.interpreter(pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")(test))


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(INTERPRETED, reason="needs a GPU")(test))


def fewer(few, all):
    """Which parameters a test goes through: `few` in the interpreter, `all` on a GPU."""
    return few if INTERPRETED else all


def repair() -> None:
    """For numpy 2.4 and later, where int() no longer takes an array of one; and rounding. The interpreter cuts
    bfloat16 off, and gets 8 bits wrong where it carries into the exponent: a GPU rounds to the nearest and
    saturates."""
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(data, source, target, rounding):
        if (source.name, target.name) == ("fp32", "bf16"):
            return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(target.name)
        if dtype is None or source.name != "fp32":
            return convert(data, source, target, rounding)
        most = torch.finfo(dtype).max
        return torch.from_numpy(data.copy()).clamp(-most, most).to(dtype).view(torch.uint8).numpy()

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._convert_float = convert_float


if INTERPRETED and HAS_TRITON:
    repair()
