"""The kernels with coefficients a token through Triton's compiler for Hopper, without a GPU."""

from __future__ import annotations

import pytest

from tests.kernels.hopper import _fresh_cache, spills  # noqa: F401
from tests.kernels.test_update_kernels_compile import build

from altup.kernels.altup_update_dynamic import triton as kernels  # isort: skip


def arguments(names, K, dtype, y):
    """Types of the arguments `names`; y and what belongs to it are None where there is no y."""
    wide = dict.fromkeys(("M", "g", "dM", "dg"), "*fp32")
    given = dict.fromkeys(("outs", "dxs", "grads", "xs"), (f"*{dtype}",) * K) | wide | {"d": "i32"}
    given |= dict.fromkeys(("y", "dy"), f"*{dtype}")
    return {name: given[name] if y or name not in ("y", "dy", "g", "dg") else None for name in names}


@pytest.mark.parametrize(("K", "dtype", "y"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False)])
def test_forward(K, dtype, y, tmp_path):
    width, config = 8 if dtype == "bf16" else 4, kernels.FORWARD
    constants = {"K": K, "BLOCK": width * 32 * config.warps * config.vectors}
    given = arguments(("outs", "xs", "y", "M", "g", "d"), K, dtype, y)
    compiled = build(kernels._forward_kernel, given | constants, config.warps)
    assert not spills(compiled, tmp_path)
    assert compiled.asm["ptx"].count("ld.global.v4") == (K + y) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == K * config.vectors


@pytest.mark.parametrize(
    ("K", "dtype", "y"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False), (8, "fp16", True)]
)
def test_backward(K, dtype, y, tmp_path):
    width, config = 8 if dtype != "fp32" else 4, kernels.BACKWARD
    constants = {"K": K, "BLOCK": width * 32 * config.warps * config.vectors, "WIDTH": width}
    given = arguments(("dxs", "dy", "dM", "dg", "grads", "xs", "y", "M", "g", "d"), K, dtype, y)
    compiled = build(kernels._backward_kernel, given | constants, config.warps)
    assert not spills(compiled, tmp_path)
    assert compiled.asm["ptx"].count("ld.global.v4") == (2 * K + y) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == (K + y) * config.vectors
