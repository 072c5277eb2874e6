"""Linear maps in fp8: `reference.py` defines how numbers are rounded and multiplied, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from altup.core.errors import UserError
from altup.kernels.fp8.functions import FeedForward, LinearMaps, Rounded, round_many_weights
from altup.kernels.fp8.reference import GRADIENT, VALUE, product_reference, quantize_reference

__all__ = [
    "GRADIENT",
    "VALUE",
    "Low",
    "Rounded",
    "check_fp8",
    "fits_fp8",
    "fp8_feed_forward",
    "fp8_linear",
    "product_reference",
    "quantize_reference",
    "round_many_weights",
]

MULTIPLE = 16  # of all sizes, which the tensor cores' fp8 needs
CAPABILITY = (8, 9)  # the first GPUs with fp8: Ada and Hopper
NOT_ROUNDED = (None, None, None)


class Low(NamedTuple):
    """An input of maps in 8 bits and its scale. It goes beside a tensor that takes the input's gradient and need
    not be written."""

    q: Tensor
    scale: Tensor


def check_fp8(device: torch.device) -> None:
    """UserError on a GPU that cannot multiply in fp8; a CPU emulates it."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or found < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"precision='fp8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more (Ada, "
            f"Hopper, Blackwell), and {name} has {found[0]}.{found[1]}; take 'bf16'"
        )


def fits_fp8(x: Tensor, *weights: Tensor) -> bool:
    """Whether all sizes of x [..., k] and weights [n, k] are multiples of 16, and x has 16 bits on a GPU."""
    if x.is_cuda and x.dtype != torch.bfloat16:
        return False
    tokens = x.numel() // x.shape[-1]
    return tokens % MULTIPLE == 0 and all(size % MULTIPLE == 0 for weight in weights for size in weight.shape)


def fp8_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bound: Tensor | None = None,
    slots: int = 0,
    rounded: Rounded | None = None,
    low: Low | None = None,
) -> tuple[Tensor, ...]:
    """x·weightᵀ for each of `weights` [nᵢ, k]: one product forward, and two backward, in fp8.

    x: [..., k], of bf16 or, on a CPU, any type; sizes as `fits_fp8` asks. `bound`, where it is known, is a number
    that no |x| exceeds; a few binades too much do no harm. `slots` as `LinearMaps` takes them.
    `rounded`: the weights in 8 bits, one below the other, where that is done; `low`: x in 8 bits, where that is
    done, and x itself is not read.
    """
    q, bound = (None, bound) if low is None else (low.q.view(-1, x.shape[-1]), low.scale)
    parts = LinearMaps.apply(x.reshape(-1, x.shape[-1]), bound, q, slots, *(rounded or NOT_ROUNDED), *weights)
    results = tuple(part.view(*x.shape[:-1], part.shape[-1]) for part in parts[: len(weights)])
    return (*results, *parts[len(weights) :])


def fp8_feed_forward(
    x: Tensor,
    wi_0: Tensor,
    wi_1: Tensor,
    wo: Tensor,
    bound: Tensor | None = None,
    rounded_wi: Rounded | None = None,
    rounded_wo: Rounded | None = None,
    low: Low | None = None,
) -> Tensor:
    """wo(gelu(wi_0·x) ⊙ wi_1·x) with the tanh form of GELU, its products in fp8; x: [..., k], `bound`,
    `rounded` and `low` as above."""
    rounded = (*(rounded_wi or NOT_ROUNDED), *(rounded_wo or NOT_ROUNDED))
    q, bound = (None, bound) if low is None else (low.q.view(-1, x.shape[-1]), low.scale)
    return FeedForward.apply(x.reshape(-1, x.shape[-1]), bound, q, wi_0, wi_1, wo, *rounded).view_as(x)
