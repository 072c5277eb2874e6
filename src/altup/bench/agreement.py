"""Whether two ways give the same answer: ‖got − want‖ / ‖want‖, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Answer = Mapping[str, Tensor | Sequence[Tensor]]


def distance(got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> float:
    """Several tensors count as one long vector. Where all of `want` is zero, the norm of `got`."""
    pairs = [(got, want)] if isinstance(got, Tensor) and isinstance(want, Tensor) else zip(got, want, strict=True)
    off = size = 0.0
    for a, b in pairs:
        wide = b.detach().double()
        if a.shape != b.shape:
            return float("inf")
        off += float((a.detach().double() - wide).square().sum())
        size += float(wide.square().sum())
    return float((off / (size or 1.0)) ** 0.5)


def errors(got: Answer, want: Answer) -> dict[str, float]:
    return {name: distance(got[name], want[name]) for name in want}


def doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Float64 copies that ask for gradients: the inputs of a reference."""
    return [t.detach().to(torch.float64).requires_grad_() for t in tensors]
