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
    """A [1, heads, queries, keys] bias that depends on the distance alone; causal ones also hide the future.

    Distances are looked up once each, queries + keys − 1 of them, and laid out along the diagonals.
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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, queries: int, keys: int, offset: int | Tensor = 0, stride: int = 1) -> Tensor:
        """Query i stands at (offset + i)·stride and key j at j·stride."""
        steps = torch.arange(queries + keys - 1, device=self.weight.device) - (queries - 1) - offset
        distance = steps * stride
        bucket = distance_bucket(distance, self.num_buckets, self.max_distance, self.bidirectional)
        by_distance = self.weight[bucket].t()
        if not self.bidirectional:
            by_distance = by_distance.masked_fill(distance > 0, torch.finfo(by_distance.dtype).min)
        return by_distance.unfold(1, keys, 1).flip(1).unsqueeze(0)
