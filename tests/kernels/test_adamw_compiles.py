"""AdamW's kernels through Triton's compiler for Hopper.

It needs no GPU, and sees what the interpreter forgives.
"""

from __future__ import annotations

import pytest

from tests.kernels.hopper import ASTSource, GPUTarget, _fresh_cache, spills, triton  # noqa: F401

# isort: split
from altup.kernels.adamw import triton as kernels

ADDRESSES = ("weights", "grads", "means", "squares", "steps")
NUMBERS = ("log_beta1", "log_beta2", "smallest", "fresh1", "fresh2", "eps", "decay")


def build(kernel, dtype, **constants):
    """For weights and gradients of `dtype`, as many as a multiple of 16."""

    def kind(name):
        if name in constants:
            return "constexpr"
        if name in ("weight_like", "grad_like"):
            return f"*{dtype}"
        if name in NUMBERS:
            return "fp32"
        return {"numel": "i32", "count": "i32", "skip": "*u8", **dict.fromkeys(ADDRESSES, "*i64")}.get(
            name, "*fp32"
        )

    signature = {name: kind(name) for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(signature)}
    aligned = [places[name] for name, type in signature.items() if type.startswith("*") or name == "numel"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4), ("bf16", 2)])
def test_passes_move_16_bytes_at_a_time(dtype, bytes_each, tmp_path):
    threads = 128
    vectors = kernels.BLOCK * bytes_each // (16 * threads)
    wide = kernels.BLOCK * 4 // (16 * threads)  # of moments

    squares = build(kernels._squares_kernel, dtype, BLOCK=kernels.BLOCK)
    assert not spills(squares, tmp_path)
    assert squares.asm["ptx"].count("ld.global.v4") == vectors

    descend = build(kernels._descend_kernel, dtype, BLOCK=kernels.BLOCK)
    assert not spills(descend, tmp_path)
    assert descend.asm["ptx"].count("ld.global.v4") == 2 * vectors + 2 * wide
    assert descend.asm["ptx"].count("st.global.v4") == vectors + 2 * wide


@pytest.mark.parametrize("ones", [{}, {"count": 1}, {"numel": 1, "count": 1}])  # which Triton makes constants
def test_the_sum_of_parts(ones, tmp_path):
    assert not spills(build(kernels._count_kernel, "fp32", PARTS=kernels.PARTS, **ones), tmp_path)


@pytest.mark.parametrize("kernel", [kernels._squares_kernel, kernels._descend_kernel])
def test_single_numbers(kernel, tmp_path):
    assert not spills(build(kernel, "fp32", BLOCK=kernels.BLOCK, numel=1), tmp_path)
