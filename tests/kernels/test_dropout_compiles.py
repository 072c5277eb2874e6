"""Dropout's kernel through Triton's compiler for Hopper, as in test_attention_compiles.py."""

from __future__ import annotations

import pytest

from tests.kernels.hopper import ASTSource, GPUTarget, _fresh_cache, spills, triton  # noqa: F401

# isort: split
from altup.kernels.dropout.reference import LANES
from altup.kernels.dropout.triton import keep_mask_kernel


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("numel", ["i32", "i64"])
def test_masks_are_written_by_vectors(numel, capability, tmp_path):
    signature = {"mask": "*i1", "seed": "*i64", "numel": numel, "drop_below": "i32", "LANES": "constexpr"}
    attributes = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2)}
    source = ASTSource(keep_mask_kernel, signature, {(4,): LANES}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert "st.global.v2" in compiled.asm["ptx"] or "st.global.b64" in compiled.asm["ptx"]
    assert not spills(compiled, tmp_path)
