"""Tensors in safetensors files: one file, or several with a JSON index beside them, as Hugging Face writes them.

They are written one tensor at a time and hashed on the way, and read row by row: no more than one tensor has to be
in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from altup.core.errors import UserError
from altup.core.files import check_file_name, read_json

SUFFIX = ".safetensors"
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}


def index_of(stem: str) -> str:
    return f"{stem}{SUFFIX}.index.json"


class TensorWriter:
    """A safetensors file of tensors like those given, which are then written in the same order."""

    def __init__(self, path: Path, like: Mapping[str, Tensor]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in like.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape)
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._path, self._file, self._hash = path, path.open("wb"), hashlib.sha256()
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, content: bytes | memoryview) -> None:
        self._hash.update(content)
        self._file.write(content)

    def write(self, tensor: Tensor) -> None:
        """The next tensor, on the CPU."""
        self._put(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> dict[str, Any]:
        """Flush the file to the disk; its size and hash."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._path.stat().st_size, "sha256": self._hash.hexdigest()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read when it is sliced."""

    file: Any
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        tensor: Tensor = (
            self.file.get_tensor(self.name) if rows is Ellipsis else self.file.get_slice(self.name)[rows]
        )
        return tensor


class TensorFiles(Mapping[str, StoredTensor]):
    """The tensors of `STEM.safetensors`, or of the files that `STEM.safetensors.index.json` names."""

    def __init__(self, folder: Path, stem: str):
        try:
            self._tensors = dict(self._open(folder, stem))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / stem}{SUFFIX} cannot be read as safetensors: {error}") from error

    def _open(self, folder: Path, stem: str) -> Iterator[tuple[str, StoredTensor]]:
        index = folder / index_of(stem)
        names = {stem + SUFFIX}
        if index.exists():
            names = set(read_json(index)["weight_map"].values())
        for name in sorted(names):
            file = safe_open(folder / check_file_name(name, str(index)), framework="pt")
            for key in file.keys():  # noqa: SIM118
                piece = file.get_slice(key)
                yield key, StoredTensor(file, key, torch.Size(piece.get_shape()), NAMES[piece.get_dtype()])

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@torch.no_grad()
def put(tensor: Tensor, value: Tensor | StoredTensor) -> None:
    """Copy a whole value to a tensor; to one that is sharded along its rows, only those that lie here."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value[...])
        return
    local, mesh = tensor.to_local(), tensor.device_mesh
    if tuple(tensor.placements) == (Shard(0),):
        length = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts it
        start = min(mesh.get_local_rank() * length, tensor.shape[0])
        local.copy_(value[start : start + local.shape[0]])
    else:
        assert not any(placement.is_shard() for placement in tensor.placements)
        local.copy_(value[...])
