"""Rows of an embedding table, whose gradient is written in one pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.embedding.reference import table_gradient_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["WIDEST", "embedding", "table_gradient_reference"]

WIDEST = 8192  # numbers of a row that a program holds
ON_GPUS = True  # whether "auto" takes the kernels: an H200 takes a fifth for 32,768 random words, half for text


def embedding(
    ids: Tensor, table: Tensor, implementation: str = "auto", dtype: torch.dtype | None = None
) -> Tensor:
    """table[ids]: [...], [words, d] → [..., d], in `dtype`, by default the table's.

    implementation: "triton", the kernels for the gradient, on Ampere GPUs or later; "plain", PyTorch's own;
    "auto", the kernels where they run.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    fits = table.dtype in FUSED_DTYPES and table.dim() == 2 and 0 < table.shape[1] <= WIDEST and ids.numel() > 0
    if implementation == "auto":
        wanted = ON_GPUS and torch.is_grad_enabled() and table.requires_grad
        implementation = "triton" if wanted and fits and runs_triton(table.device) else "plain"
    if implementation == "plain":
        return F.embedding(ids, table).to(dtype or table.dtype)
    if not (fits and can_launch(table.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton and a table in 16 or 32 bits, not {table.dtype} "
            f"{list(table.shape)} on {table.device}; use 'auto' or 'plain'"
        )
    from altup.kernels.embedding.triton import look_up

    return look_up(ids.contiguous(), table, dtype or table.dtype)
