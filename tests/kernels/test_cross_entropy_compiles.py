"""The loss kernel through Triton's compiler for Hopper. It needs no GPU and forgives less than the interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.hopper import ASTSource, GPUTarget, _fresh_cache, triton  # noqa: F401

# isort: split
from altup.kernels.cross_entropy import triton as kernel

TYPES = {"labels": "*i64", "sums": "*fp32", "z_loss": "fp32", "rows": "i32", "row_stride": "i32"}


@pytest.mark.parametrize(
    ("dtype", "columns", "gradient"), [("bf16", 8, True), ("bf16", 8, False), ("fp32", 4, True)]
)
def test_loads_are_16_bytes_wide(dtype, columns, gradient):
    """A vocabulary of 32,128 ends within a block, and rows are aligned: nothing is read one number at a time."""
    constants = {"V": 32128, "IGNORED": -100, "GRADIENT": gradient, "BLOCK": kernel.BLOCK}
    source = ASTSource(
        fn=kernel._rows,
        signature={"logits": f"*{dtype}", **TYPES, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 5)},
    )
    options = {"num_warps": kernel.WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    vectors = kernel.BLOCK // (32 * kernel.WARPS * columns)
    wide, scalar = ptx.count("ld.global.v4"), 2  # the label, and the label's logit
    assert wide == vectors * (1 + gradient)
    assert ptx.count("ld.global") - wide == scalar
