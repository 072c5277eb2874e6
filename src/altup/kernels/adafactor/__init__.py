"""One update of Adafactor, for many matrices of one shape at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.adafactor.reference import DECAY_POWER, LARGEST_RMS, SMALLEST_SQUARE, adafactor_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch

__all__ = ["adafactor_reference", "adafactor_update", "runs_fused"]


def runs_fused(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether the kernels can update these matrices."""
    kinds = {(weight.dtype, weight.shape, grad.dtype) for weight, grad in zip(weights, grads, strict=True)}
    if len(kinds) > 1 or weights[0].dtype not in FUSED_DTYPES or not can_launch(weights[0].device):
        return False
    from altup.kernels.multi_tensor import can_read

    return can_read([*weights, *grads])


@torch.no_grad()
def adafactor_update(
    weights: Sequence[Tensor], grads: Sequence[Tensor], rows: Sequence[Tensor], columns: Sequence[Tensor],
    steps: Sequence[Tensor], *, lr: Tensor | float, skip: Tensor | None = None, smallest: float,
    shape: torch.Size | None = None, total: Callable[..., list[Tensor]] | None = None,
    implementation: str = "auto",
) -> None:  # fmt: skip
    """`adafactor_reference` of many matrices [R, C], in place, counted in `steps`, which are float32 scalars.

    Nothing changes where the bool scalar `skip`, on the weights' device, is true; the host never waits for it.
    Where matrices are sharded by rows, `shape` is that of a whole one, and `total` adds tensors up over the ranks.
    "auto" takes the Triton kernels if they can update all of the matrices, "triton" requires them, and "plain"
    does not use them; it takes whole matrices only.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    fused = implementation != "plain" and runs_fused(weights, grads)
    if not fused and (implementation == "triton" or total is not None):
        raise UserError(
            "the kernels of Adafactor, which alone take sharded matrices, need a CUDA GPU, Triton, and contiguous "
            "matrices in float16, bfloat16 or float32"
        )
    skip = torch.zeros((), dtype=torch.bool, device=weights[0].device) if skip is None else skip
    if fused:
        shape, total = shape or weights[0].shape, total or _alone
        _fused(weights, grads, rows, columns, steps, lr, skip, smallest, shape, total)
        return
    for weight, grad, row, column, step in zip(weights, grads, rows, columns, steps, strict=True):
        dtype = torch.promote_types(weight.dtype, torch.float32)
        given = weight.to(dtype), grad.to(dtype), row, column, step.double() + 1
        new = *adafactor_reference(*given, lr=lr, smallest=smallest), step + 1
        for tensor, value in zip((weight, row, column, step), new, strict=True):
            tensor.copy_(torch.where(skip, tensor, value))


def _fused(
    weights: Sequence[Tensor], grads: Sequence[Tensor], rows: Sequence[Tensor], columns: Sequence[Tensor],
    steps: Sequence[Tensor], lr: Tensor | float, skip: Tensor, smallest: float, shape: torch.Size,
    total: Callable[..., list[Tensor]],
) -> None:  # fmt: skip
    """By kernels that read each gradient three times and write nothing but the weights."""
    from altup.kernels.adafactor import triton as kernels
    from altup.kernels.multi_tensor import tensor_list

    stored = {"step": list(steps), "row": list(rows), "column": list(columns)}
    old = {name: torch.stack(tensors) for name, tensors in stored.items()}
    G, W = tensor_list(grads), tensor_list(weights)
    by_row, by_column, of_weights = kernels.squares(G, W)

    step = old["step"] + 1
    fresh = (step**-DECAY_POWER).unsqueeze(-1)  # 1 - β; from β itself float32 loses digits
    row = old["row"].lerp(by_row / shape[1] + SMALLEST_SQUARE, fresh)
    column_sum, row_sum, of_weights = total(by_column, row.sum(-1), of_weights)
    column = old["column"].lerp(column_sum / shape[0] + SMALLEST_SQUARE, fresh)
    row_factor = (row_sum / shape[0]).sqrt().unsqueeze(-1) * row.rsqrt()
    column_factor = column.rsqrt()

    (squares,) = total(kernels.update_squares(G, row_factor, column_factor))
    shrink = 1 / ((squares / shape.numel()).sqrt() / LARGEST_RMS).clamp(min=1)
    size = (of_weights / shape.numel()).sqrt().clamp(min=smallest)
    kernels.descend(W, G, row_factor, column_factor, lr * size * shrink, skip)
    for name, tensor in {"step": step, "row": row, "column": column}.items():
        torch._foreach_copy_(stored[name], list(torch.where(skip, old[name], tensor).unbind()))


def _alone(*parts: Tensor) -> list[Tensor]:
    return list(parts)
