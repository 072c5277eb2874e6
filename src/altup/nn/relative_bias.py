"""T5's relative-position bias: one learned number for each head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def distance_bucket(distance: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of `distance` = key position − query position.

    Half of a direction's buckets hold one short distance each, the other half grow logarithmically up to
    `max_distance`, and everything farther shares the last one. Where attention is causal, the future's
    distances fall into bucket 0 and are masked elsewhere.
    """
    if bidirectional:
        num_buckets //= 2
        first = torch.where(distance > 0, num_buckets, 0)
        distance = distance.abs()
    else:
        first = torch.zeros_like(distance)
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """A bias of attention scores that depends on the distance alone.

    What is handed out is small, one number for each head and distance: attention lays it out along the diagonals.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool,
        std: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.last_bucket_from = self._last_bucket_from()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def _last_bucket_from(self) -> int:
        """The distance from which on all share the last bucket, in either direction."""
        distance = torch.arange(self.max_distance + 1, device="cpu")
        bucket = distance_bucket(-distance, self.num_buckets, self.max_distance, self.bidirectional)
        return int((bucket < bucket[-1]).sum())

    def forward(self, queries: int, keys: int, offset: int | Tensor = 0, stride: int = 1) -> Tensor:
        """[heads, queries + keys − 1], whose entry j − i + queries − 1 is the bias of query i and key j.

        Query i stands at (offset + i)·stride and key j at j·stride.
        """
        steps = torch.arange(queries + keys - 1, device=self.weight.device) - (queries - 1) - offset
        bucket = distance_bucket(steps * stride, self.num_buckets, self.max_distance, self.bidirectional)
        return self.weight[bucket].t()

    def constant_beyond(self, stride: int = 1) -> int:
        """The distance, in tokens `stride` apart, from which on the bias does not change any more."""
        return -(-self.last_bucket_from // stride)
