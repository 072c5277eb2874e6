"""A residual addition, with dropout, and the norm behind it: one pass forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice, check_range
from altup.kernels.add_norm.reference import add_norm_reference, kept_in_fours
from altup.kernels.dropout import decisions, dropout
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["add_norm", "add_norm_fp8", "add_norm_reference", "kept_in_fours", "rounds_norms"]

WIDEST = 8192  # numbers of a row that a program holds


def add_norm(
    x: Tensor,
    update: Tensor,
    weight: Tensor,
    eps: float,
    p: float = 0.0,
    training: bool = True,
    implementation: str = "auto",
    *,
    per_sequence: bool = False,
) -> tuple[Tensor, Tensor]:
    """s = x + dropout(update), and its norm s / √(mean(s²) + ε) · weight, both in x's dtype.

    x, update: [..., d]; weight: [d]. implementation: "triton", the kernels, on Ampere GPUs or later; "plain";
    "auto", the kernels where they run. per_sequence: as of `dropout`.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_range("p", p, 0, 1)
    d = x.shape[-1]
    alike = x.shape == update.shape and x.dtype == update.dtype and weight.shape == (d,)
    fits = alike and x.dtype in FUSED_DTYPES and d % 4 == 0 and d <= WIDEST and x.numel() > 0
    if implementation == "auto":
        implementation = "triton" if fits and runs_triton(x.device) else "plain"
    if implementation == "plain":
        return add_norm_reference(x, dropout(update, p, training, per_sequence=per_sequence), weight, eps)
    if not (fits and can_launch(x.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton and rows alike in 16 or 32 bits, not {x.dtype} "
            f"{list(x.shape)} and {update.dtype} {list(update.shape)} on {x.device}; use 'auto' or 'plain'"
        )
    from altup.kernels.add_norm.triton import add_norm_op

    drops = training and p > 0
    seed = decisions(update, p, per_sequence) if drops else None
    given = x.contiguous(), update.contiguous(), weight, seed, eps, p if drops else 0.0
    return add_norm_op(*given, False)[:2]


def rounds_norms(x: Tensor, update: Tensor) -> bool:
    """Whether `add_norm_fp8` takes these: of 16 bits, on a GPU."""
    alike = x.shape == update.shape and x.dtype == update.dtype == torch.bfloat16
    return alike and x.shape[-1] % 4 == 0 and x.shape[-1] <= WIDEST and runs_triton(x.device) and x.numel() > 0


def add_norm_fp8(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_norm` for maps in fp8: the sum; a tensor that is not written and takes the norm's gradient; the norm in
    8 bits, as of `RMSNorm.bound`; and its scale."""
    from altup.kernels.add_norm.triton import add_norm_op

    total, normed, _, q, scale = add_norm_op(x.contiguous(), update.contiguous(), weight, None, eps, 0.0, True)
    return total, normed, q, scale
