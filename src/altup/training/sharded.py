"""Checkpoints of sharded models (FSDP): every rank writes its part, and reads the rows that it needs.

What is written is the usual Hugging Face folder with several weight files: `model-00001-of-00008.safetensors`, …
and the index that names them. Every tensor is whole in one file. Each rank owns some of the tensors, about as many
bytes as the others. They are gathered one after the other; its owner writes a tensor, in a thread, while the next
ones are gathered. So a rank holds a few tensors in memory, whatever the size of the model, all ranks write at
once, and the number of ranks may be another when training resumes. The optimizer is kept in the same way.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from altup.core.errors import UserError
from altup.models.base import AltUpPreTrainedModel
from altup.training.parallel import ProcessGroup, full_tensor
from altup.training.tensor_files import SUFFIX, TensorFiles, TensorWriter, index_of, put

MODEL = "model"
OPTIMIZER = "optimizer"
WAITING = 3  # tensors of a rank that may wait to be written
Entries = dict[str, dict[str, Any]]  # file → {"bytes", "sha256"}


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is saved in parts: one of ours under FSDP. Those of others may have other names on the disk
    than in memory, which only Hugging Face's `save_pretrained` of the whole knows."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return sharded and isinstance(model, AltUpPreTrainedModel)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a model folder holds; of tied ones, that under the name which Hugging Face reads."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names: dict[int, str] = {}
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in left_out}
    for name, tensor in state.items():
        known = names.setdefault(id(tensor), name)
        if known in ties and name not in ties:
            names[id(tensor)] = name
    return {name: state[name].detach() for name in names.values()}


@torch.no_grad()
def write_parts(tensors: Mapping[str, Tensor], folder: Path, stem: str, process_group: ProcessGroup) -> Entries:
    """Write sharded tensors; to be called on every rank. Gives the size and hash of the file of this one.

    A rank that cannot write continues gathering with the others, and fails at the end.
    """
    world, rank = process_group.world_size, process_group.rank
    owners = _owners(tensors, world)
    files = [f"{stem}-{number:05d}-of-{world:05d}{SUFFIX}" for number in range(1, world + 1)]
    file = _PartFile(folder / files[rank], {name: t for name, t in tensors.items() if owners[name] == rank})
    for name, tensor in tensors.items():
        whole = full_tensor(tensor)
        if owners[name] == rank:
            file.add(whole.to("cpu", copy=True))
        del whole
    with process_group.together():
        entries = file.close()
        if process_group.is_first:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            places = {name: files[owners[name]] for name in tensors}
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (folder / index_of(stem)).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return entries


def _owners(tensors: Mapping[str, Tensor], world: int) -> dict[str, int]:
    """The rank that writes each tensor: the largest first, each to the rank with the fewest bytes so far."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    held = [0] * world
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners


class _PartFile:
    """A file that is written in a thread, a few tensors behind. What fails there is raised by `close`."""

    def __init__(self, path: Path, like: Mapping[str, Tensor]) -> None:
        self._path, self._like = path, like
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._writer: TensorWriter | None = None
        self._failure: OSError | None = None

    def add(self, tensor: Tensor) -> None:
        self._waiting.append(self._thread.submit(self._write, tensor))
        if len(self._waiting) > WAITING:
            self._waiting.popleft().result()

    def _write(self, tensor: Tensor) -> None:
        if self._failure is None:
            try:
                self._writer = self._writer or TensorWriter(self._path, self._like)
                self._writer.write(tensor)
            except OSError as error:
                self._failure = error

    def close(self) -> Entries:
        self._thread.shutdown()
        if self._failure:
            raise self._failure
        return {self._path.name: self._writer.close()} if self._writer else {}


def load_weights(model: nn.Module, folder: Path) -> None:
    """Read the weights of a model folder; of a sharded model, only the rows of this rank."""
    files, wanted = TensorFiles(folder, MODEL), weights_of(model)
    for name, tensor in wanted.items():
        found = files.get(name)
        if found is None or found.shape != tensor.shape or not found.dtype.is_floating_point:
            raise UserError(
                f"{folder}: {name} is missing or of another shape or kind; the folder is not that of this model"
            )
    for name, tensor in wanted.items():
        put(tensor, files[name])
