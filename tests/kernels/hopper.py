"""Kernels through Triton's compiler for Hopper: it needs no GPU, and sees what the interpreter forgives."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402, F401
from triton.compiler import ASTSource  # noqa: E402, F401

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    if not (TOOLS / "ptxas").exists():
        pytest.skip(f"needs {TOOLS / 'ptxas'}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def _dump(compiled, folder, option: str) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_bytes(compiled, folder) -> int:
    """What a thread needs beside its registers."""
    return int(re.search(r"STACK:(\d+)", _dump(compiled, folder, "-res-usage")).group(1))


def spills(compiled, folder) -> bool:
    return stack_bytes(compiled, folder) > 0


def loop_length(compiled, folder) -> int:
    """Machine instructions of the longest loop."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", _dump(compiled, folder, "-sass"))
    places = {int(address, 16): place for place, (address, _) in enumerate(found)}
    lengths = [0]
    for place, (_, text) in enumerate(found):
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        begin = places.get(int(target.group(1), 16), place) if target else place
        lengths.append(place - begin + 1 if begin < place else 0)
    return max(lengths)
