"""Arguments of the attention kernels besides their tensors, and their launch configurations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.kernels.dropout.reference import drop_below, keep_scale
from altup.kernels.launch import interprets_triton


class TileConfig(NamedTuple):
    """How a kernel is cut: the queries and keys of a tile, a program's warps, the stages of its pipeline, the
    registers that a thread may use (with fewer, more programs run at once), and whether the copy engine that GPUs
    have since Hopper loads the tiles, which spares registers for addresses."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    engine: bool = False


# By the width of a head, so that registers suffice: see benchmarks/tune_attention.py of commit 575338fc.
FORWARD = {
    16: TileConfig(128, 64, 4, 3),
    32: TileConfig(128, 64, 4, 3, 128, engine=True),
    64: TileConfig(128, 64, 4, 3, 168, engine=True),
    128: TileConfig(128, 64, 8, 2),
}
QUERIES = {
    16: TileConfig(64, 64, 4, 2),
    32: TileConfig(64, 64, 4, 3),
    64: TileConfig(64, 64, 4, 3, engine=True),
    128: TileConfig(64, 64, 4, 2),
}
KEYS = {
    16: TileConfig(64, 64, 4, 2),
    32: TileConfig(64, 64, 4, 3, 168),
    64: TileConfig(64, 64, 4, 3, 168, engine=True),
    128: TileConfig(64, 64, 8, 2),
}
# Up to so many keys dropout's decisions are drawn once, as bits that all kernels read: with 512 attention takes
# 0.80 instead of 0.92 ms on an H200. In longer rows, which hold many examples, most pairs are never looked at.
MOST_KEYS_WITH_BITS = 1024
TUNED = (torch.bfloat16,)  # in which limits on registers and the copy engine were timed
# For few queries, as a decoder has: a program makes a few steps and ends.
FEW_QUERIES = 128
KEYS_OF_FEW = {**KEYS, 32: TileConfig(32, 64, 4, 3, 128), 64: TileConfig(32, 64, 4, 3, 128)}
# Before Hopper, where the above would spill kilobytes (`_spills_keys`): the largest that the assembler fits into
# registers. Not timed.
KEYS_BEFORE_HOPPER = {**KEYS, 32: TileConfig(32, 64, 4, 3), 64: TileConfig(64, 32, 4, 3)}
WIDTHS = tuple(FORWARD)
PEAKS = 64  # slots for the largest numbers of gradients


class AttentionCall(NamedTuple):
    """Tensors and settings that every kernel reads; q [B, H, Q, D], k and v [B, H, K, D], see `attention`.

    `seed` [1] is that of dropout, or in its place the bits that were drawn with it (`keep_bits_op`), or which keys
    are kept for all queries: float32 [B, H, K], 1 or 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    by_distance: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    seed: Tensor | None
    causal: bool
    dropout: float
    scale: float
    constant_beyond: int | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, queries, keys."""
        return self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def sequences(self) -> int:
        """Batch × heads."""
        return self.q.shape[0] * self.q.shape[1]

    def cut(self, configs: dict[int, TileConfig]) -> TileConfig:
        """The kernel's configuration, with tiles no larger than the work, and then few warps for them.

        Limits on registers are for Hopper, and too tight for packed causal rows and for dropout by pair: with its
        bits attention takes 0.872 instead of 0.799 ms (the copy engine without limits 0.787).
        Telling the copy engine of a tensor takes the host about 10 µs, too long for few queries; limits were timed
        with it.
        """
        config = configs[self.q.shape[3]]
        _, Q, K = self.sizes
        queries, keys = _fit(config.queries, Q), _fit(config.keys, K)
        if (queries, keys) != (config.queries, config.keys):
            return TileConfig(queries, keys, 4, config.stages)
        tuned = self.q.dtype in TUNED and has_copy_engine(self.q.device)
        tight = self.decides_by_pair or self.is_packed_causal
        if not tuned or (config.registers and tight) or (config.engine and Q <= FEW_QUERIES):
            return config._replace(registers=None, engine=False)
        return config

    @property
    def keeps_bits(self) -> bool:
        return self.seed is not None and self.seed.dtype == torch.int32

    @property
    def decides_by_pair(self) -> bool:
        """Whether dropout has a decision for each query and key."""
        return self.seed is not None and not self.seed.is_floating_point()

    @property
    def is_packed_causal(self) -> bool:
        return self.causal and self.query_segments is not None

    @property
    def key_tiles(self) -> dict[int, TileConfig]:
        """Configurations of the kernel for keys."""
        if self._has_few_queries:
            return KEYS_OF_FEW
        return KEYS_BEFORE_HOPPER if self._spills_keys else KEYS

    @property
    def _has_few_queries(self) -> bool:
        plain = self.query_segments is None and not self.decides_by_pair
        return plain and self.q.dtype in TUNED and self.q.shape[2] <= FEW_QUERIES

    @property
    def _spills_keys(self) -> bool:
        """Whether 64 × 64 scores and their bias are too many registers; in 32 bits they are in any case."""
        wide = self.q.shape[3] == 64 or self.is_packed_causal
        biased = self.by_distance is not None and self.q.element_size() == 2
        return wide and biased and not has_copy_engine(self.q.device)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.by_distance, self.query_segments, self.key_segments, self.seed

    def numbers(self) -> tuple[float, int, float]:
        """The scale; below which random word a weight is dropped; what the others are multiplied by."""
        return self.scale, drop_below(self.dropout), keep_scale(self.dropout)

    def constants(self, config: TileConfig) -> dict[str, Any]:
        _, Q, K = self.sizes
        return {
            "D": self.q.shape[3],
            "BM": config.queries,
            "BN": config.keys,
            "BIAS": self.by_distance is not None,
            "CAUSAL": self.causal,
            "SEGMENTS": self.query_segments is not None,
            "DROPOUT": self.seed is not None,
            "BITS": self.keeps_bits,
            "SHARED": self.seed is not None and not self.decides_by_pair,
            "EVEN": Q % config.queries == 0 and K % config.keys == 0,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "num_warps": config.warps,
            "num_stages": config.stages,
            "maxnreg": config.registers,
        }


def _fit(tile: int, count: int) -> int:
    return min(tile, max(16, 1 << (count - 1).bit_length()))


def draws_once(device: torch.device, keys: int) -> bool:
    """Whether dropout's decisions are bits that all kernels read. Before Hopper the keys' kernel would spill."""
    return keys <= MOST_KEYS_WITH_BITS and has_copy_engine(device)


@torch.compiler.assume_constant_result
def has_copy_engine(device: torch.device) -> bool:
    return _has_copy_engine(device)


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return interprets_triton() or torch.cuda.get_device_capability(device) >= (9, 0)


def descriptors(config: TileConfig, rows: int, *tensors: Tensor) -> list[Any]:
    """What the copy engine needs to know of tensors [B, H, N, D] to load `rows` rows at a time; None each where it
    does not load. It counts in 16 bytes, and was not tried on rows that are all the same, as a mean's gradient
    has them: those lie 0 bytes apart."""
    counted = (step * x.element_size() for x in tensors for step in x.stride()[:3])
    fits = all(size > 0 and size % 16 == 0 for size in counted) and all(x.data_ptr() % 16 == 0 for x in tensors)
    if not config.engine or not fits:
        return [None] * len(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[3]]) for x in tensors]


def strides(*tensors: Tensor) -> list[int]:
    """The steps between batches, heads and rows of each [B, H, N, D] tensor."""
    return [step for x in tensors for step in x.stride()[:3]]


def apart(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each [B, H, N, D], of three such parts or of fewer [B, N, n, H, D]."""
    if parts[0].dim() == 4:
        q, k, v = parts
    else:
        q, k, v = (one.transpose(1, 2) for part in parts for one in part.unbind(2))
    return q, k, v


def empty_heads(x: Tensor) -> Tensor:
    """Fresh memory for [B, H, N, D] laid out as [B, N, H, D], which is how projections read and write it."""
    B, H, N, D = x.shape
    return x.new_empty(B, N, H, D).transpose(1, 2)
