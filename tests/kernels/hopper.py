"""Kernels through Triton's compiler for Hopper: it needs no GPU, and sees what the interpreter forgives."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.interpreter import HAS_TRITON, INTERPRETED

NUMBERS = ("i32", "i64", "fp32")


def is_type(value) -> bool:
    return isinstance(value, tuple) or (
        isinstance(value, str) and (value.startswith(("*", "tensordesc")) or value in NUMBERS)
    )


class Hopper:
    """The compiler, with a folder for what it writes."""

    def __init__(self, folder: Path) -> None:
        if not HAS_TRITON or INTERPRETED:
            pytest.skip("needs Triton's compiler")
        import triton

        self.folder = folder
        self.tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        if not (self.tools / "ptxas").exists():
            pytest.skip(f"needs {self.tools / 'ptxas'}")

    def build(self, kernel, arguments: dict, *, divisible=(), capability=90, **options):
        """Compile `kernel`, whose arguments are types ("*bf16", a tuple of such, "i32") or else constants.

        Pointers are aligned to 16 bytes, and the numbers that `divisible` names are multiples of 16.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, aligned = {}, {}, []
        for place, name in enumerate(kernel.arg_names):
            value = arguments[name]
            signature[name] = value if is_type(value) else "constexpr"
            if not is_type(value):
                constants[(place,)] = value
            elif isinstance(value, tuple):
                aligned += [(place, inner) for inner in range(len(value))]
            elif value.startswith("*") or name in divisible:
                aligned.append((place,))
        attributes = {place: [["tt.divisibility", 16]] for place in aligned}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

    def stack_bytes(self, compiled) -> int:
        """What a thread needs beside its registers."""
        return int(re.search(r"STACK:(\d+)", self._dump(compiled, "-res-usage")).group(1))

    def spills(self, compiled) -> bool:
        return self.stack_bytes(compiled) > 0

    def loop_length(self, compiled) -> int:
        """Machine instructions of the longest loop."""
        found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", self._dump(compiled, "-sass"))
        places = {int(address, 16): place for place, (address, _) in enumerate(found)}
        lengths = [0]
        for place, (_, text) in enumerate(found):
            target = re.search(r"BRA.*0x([0-9a-f]+)", text)
            begin = places.get(int(target.group(1), 16), place) if target else place
            lengths.append(place - begin + 1 if begin < place else 0)
        return max(lengths)

    def remarks(self, compiled) -> str:
        """What the assembler says of its own accord."""
        source = self.folder / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [self.tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", self.folder / "kernel.o"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def _dump(self, compiled, option: str) -> str:
        cubin = self.folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [self.tools / "cuobjdump", option, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
