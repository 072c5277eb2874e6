"""What attention knows of positions: T5's relative bias, and the rotary angles of today's decoders."""

from __future__ import annotations

import math
from typing import Any

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
    """T5's bias of attention scores by distance: one learned number for each head and bucket of distances.

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
        if self.weight.is_cuda and torch.is_grad_enabled():
            return OfEachDistance.apply(self.weight, bucket)
        return self.weight[bucket].t()

    def constant_beyond(self, stride: int = 1) -> int:
        """The distance, in tokens `stride` apart, from which on the bias does not change any more."""
        return -(-self.last_bucket_from // stride)


class OfEachDistance(torch.autograd.Function):
    """weight [buckets, heads], bucket [distances] → [heads, distances] in float32 or better, as kernels read it.

    The gradient is a small product: to add up few rows many times, PyTorch sorts and takes 0.08 ms.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bucket: Tensor) -> Tensor:
        ctx.save_for_backward(bucket)
        ctx.buckets, ctx.dtype = weight.shape[0], weight.dtype
        return weight.to(torch.promote_types(weight.dtype, torch.float32))[bucket].t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bucket,) = ctx.saved_tensors
        holds = torch.arange(ctx.buckets, device=bucket.device)[:, None] == bucket
        return (holds.double() @ grad.t().double()).to(ctx.dtype), None


def rotation(positions: Tensor, width: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Rotary angles positions · theta^(−2i/width), for i below width / 2, as cosine and sine in float32.

    positions: [batch, tokens] → two tensors [batch, 1, tokens, width / 2] that broadcast over heads.
    """
    powers = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None, :, None].float() * (1.0 / theta**powers)
    return angles.cos(), angles.sin()
