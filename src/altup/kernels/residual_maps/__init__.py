"""What stands between two parts of a layer where rows are short: a map, the residual addition, the norm, and the
next map."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from altup.core.errors import check_choice
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton
from altup.kernels.residual_maps.op import gated_map_op, residual_maps_op
from altup.kernels.residual_maps.reference import residual_maps_reference

__all__ = ["Unmapped", "residual_maps", "residual_maps_reference", "takes_kernels"]

SHORTEST, LONGEST = 16, 256  # rows that a program can hold; a power of two
ON_GPUS = False  # whether "auto" takes the kernels; not timed yet


class Unmapped(NamedTuple):
    """An update of the residual stream before its last map: a·weightᵀ or, where a is [gate | linear] and `hidden`
    its GEGLU, hidden·weightᵀ. a: [..., k], weight: [d, k]."""

    a: Tensor
    hidden: Tensor | None
    weight: Tensor

    def map(self) -> Tensor:
        """The update."""
        if self.hidden is None:
            return self.a @ self.weight.t()
        y = gated_map_op(_flat(self.a), _flat(self.hidden), self.weight)
        return y.view(*self.a.shape[:-1], len(self.weight))


def takes_kernels(x: Tensor, *widths: int, implementation: str = "auto") -> bool:
    """Whether the kernels are for rows like x's, and maps from and to so many numbers."""
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    d = x.shape[-1]
    fits = SHORTEST <= d <= LONGEST and d & (d - 1) == 0 and all(width % 16 == 0 for width in widths)
    fits = fits and x.dtype in FUSED_DTYPES and x.numel() > 0
    if implementation == "auto":
        return ON_GPUS and fits and x.element_size() == 2 and runs_triton(x.device)
    return fits and implementation == "triton" and can_launch(x.device)


def residual_maps(
    x: Tensor, update: Unmapped, norm_weight: Tensor, eps: float, following: Tensor, gates: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """s = x + update, y = norm(s)·followingᵀ and, with `gates`, y's GEGLU, for rows that `takes_kernels` takes.

    x: [..., d], norm_weight: [d], following: [n, d] → [..., d], [..., n], [..., n / 2]. All but `norm_weight` are
    of one dtype. Nothing but an `Unmapped` may read y's GEGLU, whose gradient reaches y.
    """
    hidden = None if update.hidden is None else _flat(update.hidden)
    total, y, gated, _, _ = residual_maps_op(
        _flat(x),
        _flat(update.a),
        hidden,
        update.weight.contiguous(),
        norm_weight,
        following.contiguous(),
        eps,
        gates,
    )
    rows = x.shape[:-1]
    return total.view(x.shape), y.view(*rows, -1), gated.view(*rows, -1) if gates else None


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])
