"""The kernels through Triton's compiler for Hopper: it needs no GPU, and sees what the interpreter forgives."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.kernels.hopper import (
    TOOLS,
    ASTSource,
    GPUTarget,
    _fresh_cache,  # noqa: F401
    loop_length,
    stack_bytes,
    triton,
)

# isort: split
from altup.kernels.attention import launch
from altup.kernels.attention.forward import forward_kernel
from altup.kernels.attention.keys_backward import keys_kernel
from altup.kernels.attention.queries_backward import queries_kernel

KERNELS = [(forward_kernel, launch.FORWARD), (queries_kernel, launch.QUERIES), (keys_kernel, launch.KEYS)]
FLAGS = ("BIAS", "BIAS_GRAD", "EDGES", "CAUSAL", "SEGMENTS", "DROPOUT", "EVEN")
NEEDED_BY = {
    "bias": "BIAS",
    "strips": "BIAS_GRAD",
    "query_segments": "SEGMENTS",
    "key_segments": "SEGMENTS",
    "seed": "DROPOUT",
}
FLOATS = ("scale", "keep_scale")


def build(kernel, config, width, flags, capability=90, **fixed):
    """Compile for bfloat16; flags are named, and all others are off."""
    constants = {"D": width, "BM": config.queries, "BN": config.keys, "PRECISION": "tf32"}
    constants |= {flag: flag in flags for flag in FLAGS} | fixed
    signature, constexprs, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or not constants.get(NEEDED_BY.get(name), True):
            signature[name], constexprs[(place,)] = "constexpr", constants.get(name)
            continue
        if name in FLOATS:
            signature[name] = "fp32"
            continue
        if name in ("lse", "delta", "bias", "strips"):
            signature[name] = "*fp32"
        elif name == "seed":
            signature[name] = "*i64"
        elif "segments" in name:
            signature[name] = "*i32"
        elif name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv"):
            signature[name] = "*bf16"
        else:
            signature[name] = "i32"
        steps = name.endswith(("_batch", "_head", "_row"))
        if signature[name].startswith("*") or steps or ("EVEN" in flags and name in ("queries", "keys")):
            attributes[(place,)] = [["tt.divisibility", 16]]
    options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def remarks(compiled, folder):
    """What the assembler says of its own accord."""
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.o"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("flags", [("BIAS", "BIAS_GRAD", "EVEN"), ("BIAS", "BIAS_GRAD", "EDGES", "EVEN")])
@pytest.mark.parametrize(("kernel", "configs"), KERNELS)
def test_pretraining_stays_in_registers(kernel, configs, flags, tmp_path):
    compiled = build(kernel, configs[64], 64, flags)
    assert stack_bytes(compiled, tmp_path) <= 64
    assert "wgmma" in compiled.asm["ptx"]
    assert "serialized" not in remarks(compiled, tmp_path)
    inside = compiled.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
    moved = re.findall(r"convert_layout .* : tensor<(\d+)x(\d+)xf32.*#mma", inside)
    assert not [shape for shape in moved if shape == (str(configs[64].queries), str(configs[64].keys))]


@pytest.mark.parametrize(("kernel", "configs"), KERNELS)
def test_dropout_in_packed_rows_is_cheap(kernel, configs, tmp_path):
    flags = ("BIAS", "BIAS_GRAD", "EDGES", "EVEN", "SEGMENTS")
    without, compiled = (build(kernel, configs[64], 64, (*flags, *more)) for more in ((), ("DROPOUT",)))
    assert stack_bytes(compiled, tmp_path) <= 64
    lengths = [loop_length(one, tmp_path) for one in (without, compiled)]
    print(f"{kernel.__name__}: {lengths[0]} instructions a tile without dropout, {lengths[1]} with")
    assert lengths[1] < 1.7 * lengths[0]


VARIANTS = [
    ("BIAS", "BIAS_GRAD", "CAUSAL"),
    ("BIAS", "BIAS_GRAD", "SEGMENTS", "DROPOUT", "CAUSAL", "EDGES"),
    ("SEGMENTS",),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", launch.WIDTHS)
@pytest.mark.parametrize("flags", VARIANTS)
@pytest.mark.parametrize(("kernel", "configs"), KERNELS)
def test_every_variant_compiles(kernel, configs, flags, width, capability):
    build(kernel, configs[width], width, flags, capability)


@pytest.mark.slow
@pytest.mark.parametrize("single", ["queries", "keys"])
@pytest.mark.parametrize(("kernel", "configs"), KERNELS)
def test_a_single_query_or_key_compiles(kernel, configs, single):
    """Triton takes an argument of 1 for a constant."""
    config = configs[64]._replace(**{single: 16})
    build(kernel, config, 64, ("BIAS", "BIAS_GRAD", "CAUSAL"), **{single: 1})
