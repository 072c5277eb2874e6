"""Both updates' kernels through Triton's compiler for Hopper.

It needs no GPU, and sees what the interpreter forgives.
"""

from __future__ import annotations

import pytest

from tests.kernels.hopper import ASTSource, GPUTarget, _fresh_cache, spills, triton  # noqa: F401

# isort: split
from altup.kernels.altup_update import triton as kernels
from altup.kernels.sequence_update import triton as sequence_kernels

NOT_SPECIALISED = ("active", "programs", "count", "tokens", "windows", "per_row")


def build(kernel, arguments: dict, num_warps: int):
    """Compile for compute capability 9.0: pointers as "*bf16", tuples of them, "i32", or constants."""

    def is_type(value):
        return isinstance(value, str | tuple)

    signature = {name: value if is_type(value) else "constexpr" for name, value in arguments.items()}
    places = {name: (i,) for i, name in enumerate(arguments)}
    aligned = [
        (*places[name], *inner)
        for name, value in arguments.items()
        if is_type(value) and name not in NOT_SPECIALISED
        for inner in ([(i,) for i in range(len(value))] if isinstance(value, tuple) else [()])
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in arguments.items() if not is_type(value)},
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


def state(K, dtype):
    return dict.fromkeys(("outs", "dxs", "grads", "xs"), (f"*{dtype}",) * K) | {
        "y": f"*{dtype}",
        "dy": f"*{dtype}",
        "P": "*fp32",
        "g": "*fp32",
        "active": "i32",
        "n": "i32",
    }


@pytest.mark.parametrize(("K", "dtype", "residual"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False)])
def test_forward(K, dtype, residual, tmp_path):
    given, config = state(K, dtype), kernels.FORWARD[K]
    names = ("outs", "xs", "y", "residual", "P", "g", "active", "n")
    arguments = {name: given.get(name, f"*{dtype}" if residual else None) for name in names}
    width = 8 if dtype == "bf16" else 4
    block = width * 32 * config.warps * config.vectors
    compiled = build(kernels._forward_kernel, {**arguments, "K": K, "BLOCK": block}, config.warps)
    assert not spills(compiled, tmp_path)
    assert compiled.asm["ptx"].count("ld.global.v4") == (K + 1 + residual) * config.vectors
    assert compiled.asm["ptx"].count("st.global.v4") == K * config.vectors


@pytest.mark.parametrize(
    ("K", "dtype", "residual"), [(2, "bf16", True), (4, "bf16", True), (3, "fp32", False), (8, "fp16", False)]
)
def test_backward(K, dtype, residual, tmp_path):
    given, config = state(K, dtype), kernels.BACKWARD[K]
    names = ("dxs", "dy", "partials", "grads", "xs", "y", "residual", "P", "g", "active", "n")
    arguments = {name: given.get(name, f"*{dtype}" if residual else None) for name in names}
    arguments["partials"] = "*fp32"
    width = 8 if dtype != "fp32" else 4
    block = width * 32 * config.warps * config.vectors
    constants = {"K": K, "BLOCK": block, "WIDTH": width, "STAGES": config.stages}
    compiled = build(kernels._backward_kernel, {**arguments, **constants}, config.warps)
    assert not spills(compiled, tmp_path)
    assert compiled.asm["ptx"].count("st.global.v4") == (K + 1) * config.vectors


@pytest.mark.parametrize("K", [1, 4, 8])
def test_coefficients(K, tmp_path):
    rows, columns, config = triton.next_power_of_2(K), triton.next_power_of_2(K + 1), kernels.COEFFICIENTS
    chunk = config.vectors * 4 * 32 * config.warps // (rows * columns)
    constants = {"K": K, "ROWS": rows, "COLUMNS": columns, "CHUNK": chunk}
    arguments = dict.fromkeys(("dP", "dg", "partials", "P", "g"), "*fp32") | {"active": "i32", "programs": "i32"}
    assert not spills(build(kernels._coefficients_kernel, {**arguments, **constants}, config.warps), tmp_path)


@pytest.mark.parametrize("stride", [4, 8, 16])
def test_sequence(stride, tmp_path):
    sizes = dict.fromkeys(("count", "tokens", "windows", "per_row"), "i32")
    given = {"x": "*bf16", "computed": "*bf16", "a": "*fp32", "b": "*fp32", **sizes}
    config = sequence_kernels.FORWARD
    constants = {"STRIDE": stride, "VECTORS": 32 * config.warps * config.vectors, "WIDTH": 8}
    forward = build(sequence_kernels._forward_kernel, {"out": "*bf16", **given, **constants}, config.warps)
    assert not spills(forward, tmp_path)
    assert forward.asm["ptx"].count("ld.global.v4") == (stride + 1) * config.vectors

    config = sequence_kernels.BACKWARD[stride]
    constants |= {"VECTORS": 32 * config.warps * config.vectors, "STAGES": config.stages}
    results = {"dx": "*bf16", "d_computed": "*bf16", "partials": "*fp32", "grad": "*bf16"}
    backward = build(sequence_kernels._backward_kernel, {**results, **given, **constants}, config.warps)
    assert not spills(backward, tmp_path)
    assert backward.asm["ptx"].count("st.global.v4") == (stride + 1) * config.vectors


def test_sequence_coefficients(tmp_path):
    arguments = dict.fromkeys(("da", "db", "partials", "a", "b"), "*fp32") | {"programs": "i32"}
    config = sequence_kernels.COEFFICIENTS
    arguments["CHUNK"] = config.vectors * 32 * config.warps
    assert not spills(build(sequence_kernels._coefficients_kernel, arguments, config.warps), tmp_path)
