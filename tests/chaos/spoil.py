"""Ways to spoil a file or a value; each says in words what it did."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

NOT_NUMBERS = ("x", "", " ", "1,5", "1..2", "0x1g", "--", "None", "½", "1" * 5000 + "x", "\udcff", "💥")
NOT_WHOLE = (*NOT_NUMBERS, "1.5", "1e3", "nan", "inf")
WRONG: tuple[Any, ...] = (
    *(None, [], {}, "x", "", -1, 10**30, 1e308, float("nan"), float("inf"), True, [[]], [None], {"x": None}),
    *("../../x", "/etc/passwd", "x" * 5000, [1, "a"], -(10**30), 0, 0.5),
)
NAMES = (
    *("nowhere", "../nowhere", "a/b/c", " ", "~", "http://127.0.0.1:9/x", "💥", "%s%n", "$(touch owned)", "a\nb"),
    *("\udcff\udcfe", "x" * 300, "x" * 5000, "pipe", "loop", "noise", "hollow", "/dev/null", "/dev/zero"),
    *("/proc/self/mem", "a\tb", "-", "\x1b[31mred"),
)
Spoil = Callable[[random.Random, Path], str]


def add_oddities(box: Path) -> None:
    """What some of NAMES name."""
    os.mkfifo(box / "pipe")
    (box / "loop").symlink_to(box / "loop")
    (box / "noise").write_bytes(random.Random(0).randbytes(3000))
    (box / "hollow").mkdir()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def truncate(draw: random.Random, path: Path) -> str:
    size = path.stat().st_size
    kept = draw.randrange(1, max(2, size - 2))
    os.truncate(path, kept)
    return f"{path.name} cut to {kept} of {size} bytes"


def empty(draw: random.Random, path: Path) -> str:
    path.write_bytes(b"")
    return f"{path.name} empty"


def noise(draw: random.Random, path: Path) -> str:
    path.write_bytes(draw.randbytes(draw.choice((1, 7, 100, 5000))))
    return f"{path.name} is noise"


def delete(draw: random.Random, path: Path) -> str:
    _remove(path)
    return f"{path.name} missing"


def folder_instead(draw: random.Random, path: Path) -> str:
    _remove(path)
    path.mkdir()
    return f"{path.name} is a folder"


def pipe_instead(draw: random.Random, path: Path) -> str:
    _remove(path)
    os.mkfifo(path)
    return f"{path.name} is a pipe"


def loop_instead(draw: random.Random, path: Path) -> str:
    _remove(path)
    path.symlink_to(path)
    return f"{path.name} is a link to itself"


def other_json(draw: random.Random, path: Path) -> str:
    text = draw.choice(("[]", "null", "3", '"x"', "[1, 2]", "true", "NaN", "[" * 5000, '{"a":' * 3000, "{}" * 2))
    path.write_text(text)
    return f"{path.name} is {text[:20]}"


def flip(draw: random.Random, path: Path) -> str:
    """Some bytes are others."""
    content = bytearray(path.read_bytes())
    places = [draw.randrange(len(content)) for _ in range(draw.choice((1, 3, 20)))]
    for place in places:
        content[place] ^= draw.randrange(1, 256)
    path.write_bytes(content)
    return f"{path.name}: bytes {places} are others"


UNREADABLE: tuple[Spoil, ...] = (truncate, empty, noise, folder_instead, pipe_instead, loop_instead)


def wrong_value(draw: random.Random, path: Path) -> str:
    """One value of a JSON file, wherever it is, becomes one of another kind."""
    content = json.loads(path.read_text())
    where, holder, key = draw.choice(list(places(content, "")))
    holder[key] = copy.deepcopy(draw.choice(WRONG))
    path.write_text(json.dumps(content))
    return f"{path.name}: {where}={str(holder[key])[:40]!r}"


def places(value: Any, name: str) -> list[tuple[str, Any, Any]]:
    """Every value in a tree: its path, what holds it, its key there. Long lists count by their first entries."""
    found = []
    entries = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, one in entries[:40]:
        found += [(f"{name}.{key}", value, key), *places(one, f"{name}.{key}")]
    return found


def set_values(path: Path, **values: Any) -> str:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))
    return f"{path.name}: {str(values)[:80]}"


def bad_safetensors(draw: random.Random, path: Path) -> str:
    """A header that lies, tensors that are missing or have another shape."""
    from safetensors.torch import load_file, save_file

    kind = draw.choice(("header", "huge header", "missing", "renamed", "shape", "text", "offsets"))
    if kind == "header":
        path.write_bytes(struct.pack("<Q", 10) + b"{not json}" + bytes(100))
    elif kind == "huge header":
        path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    elif kind == "offsets":
        header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    elif kind == "text":
        path.write_text("hello " * 100)
    else:
        tensors = load_file(path)
        name = draw.choice(sorted(n for n in tensors if tensors[n].dim() == 2))
        tensor = tensors.pop(name)
        if kind == "renamed":
            tensors[f"{name}.x"] = tensor
        elif kind == "shape":
            tensors[name] = tensor[:-1].contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    return f"{path.name}: {kind}"


_NAMES = "abcdefghijklm"
_BOMB = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(_NAMES))
BROKEN_YAML = (
    _BOMB,
    "a: [1, 2", "a: b: c", "\t- x", "- a\n- b\n", "just text", "42", "{{{{",
    "a: !!python/object/apply:os.system [ls]",
    "a: &a [*a]", "? [a]\n: b", "a: 'x", "!!binary x", "\x00", "steps: 1\n  lr: 2", "%YAML 9.9\n---\na: 1",
    "[" * 3000, "a: " + "9" * 6000, "---\na: 1\n---\na: 2\n", "unknown_name: 1", "steps: {}\n", "<<: 3\n",
    "<<: [1]\n",
    "1: 2", "null: 3", "[a]: 1", "{a: 1}: 2", "2020-01-01: 1", "steps: 2020-99-99", "steps: 0o9", "'': 1",
)  # fmt: skip


def broken_yaml(draw: random.Random, path: Path) -> str:
    text = draw.choice(BROKEN_YAML)
    path.write_text(text)
    return f"{path.name}: {text[:50]!r}"


def bomb(draw: random.Random, path: Path) -> str:
    """A small archive of many lines."""
    with gzip.open(path, "wb") as file:
        line = b'{"sentence": "a", "label": 0, "text": "a"}\n' * 100_000
        for _ in range(30):
            file.write(line)
    return f"{path.name} unpacks to {3_000_000:,} lines"
