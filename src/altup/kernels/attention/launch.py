"""Arguments of the attention kernels besides their tensors, and their launch configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from altup.kernels.dropout.reference import drop_below, keep_scale


class TileConfig(NamedTuple):
    """How a kernel is cut: the queries and keys of a tile, a program's warps, the stages of its pipeline, and the
    registers that a thread may use: with fewer, more programs run at once."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    squares: bool = False
    engine: bool = False


# By the width of a head, so that registers suffice. benchmarks/tune_attention.py times these and others.
FORWARD = {
    16: TileConfig(128, 64, 4, 3),
    32: TileConfig(128, 64, 4, 3),
    64: TileConfig(128, 64, 4, 3),
    128: TileConfig(128, 64, 8, 2),
}
QUERIES = {
    16: TileConfig(64, 64, 4, 2),
    32: TileConfig(64, 64, 4, 2),
    64: TileConfig(64, 64, 4, 3),
    128: TileConfig(64, 64, 4, 2),
}
KEYS = {
    16: TileConfig(64, 64, 4, 2),
    32: TileConfig(64, 64, 4, 2),
    64: TileConfig(64, 64, 4, 3),
    128: TileConfig(64, 64, 8, 2),
}
# For few queries, as a decoder reads its encoder's output: a program makes a few steps and ends. In bfloat16,
# without bias, causal mask, segments and dropout an H200 gave the same bits.
FEW_QUERIES = 128
KEYS_OF_FEW = {**KEYS, 64: TileConfig(32, 64, 4, 2)}
WIDTHS = tuple(FORWARD)
PEAKS = 64  # slots for the largest numbers of gradients


class AttentionCall(NamedTuple):
    """Tensors and settings that every kernel reads; q [B, H, Q, D], k and v [B, H, K, D], see `attention`."""

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
        """The kernel's configuration, with tiles no larger than the work, and then few warps for them."""
        config = configs[self.q.shape[3]]
        _, Q, K = self.sizes
        queries, keys = _fit(config.queries, Q), _fit(config.keys, K)
        if (queries, keys) == (config.queries, config.keys):
            return config
        return config._replace(queries=queries, keys=keys, warps=4, registers=None)

    @property
    def has_few_queries(self) -> bool:
        plain = self.by_distance is None and self.query_segments is None and self.seed is None
        seen = self.q.dtype == torch.bfloat16 and not self.causal
        return plain and seen and self.q.shape[2] <= FEW_QUERIES

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
            "EVEN": Q % config.queries == 0 and K % config.keys == 0,
            "SQUARES": config.squares,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "num_warps": config.warps,
            "num_stages": config.stages,
            "maxnreg": config.registers,
        }


def _fit(tile: int, count: int) -> int:
    return min(tile, max(16, 1 << (count - 1).bit_length()))


def descriptors(config: TileConfig, rows: int, *tensors: Tensor) -> list[Any]:
    """Of tensors [B, H, N, D], for tiles of `rows`; None each if the kernel does without."""
    if not config.engine:
        return [None] * len(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(x, [1, 1, rows, x.shape[3]]) for x in tensors]


def strides(*tensors: Tensor) -> list[int]:
    """The steps between batches, heads and rows of each [B, H, N, D] tensor."""
    return [step for x in tensors for step in x.stride()[:3]]


def empty_heads(x: Tensor) -> Tensor:
    """Fresh memory for [B, H, N, D] laid out as [B, N, H, D], which is how projections read and write it."""
    B, H, N, D = x.shape
    return x.new_empty(B, N, H, D).transpose(1, 2)
