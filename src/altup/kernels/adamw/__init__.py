"""One update of AdamW-RMS, for many tensors at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.adamw.reference import adamw_reference
from altup.kernels.launch import IMPLEMENTATIONS, runs_fused

__all__ = ["adamw_reference", "adamw_update", "runs_fused"]


@torch.no_grad()
def adamw_update(
    weights: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor],
    steps: Sequence[Tensor], largest: Sequence[Tensor] | None = None, *, lr: Tensor | float,
    skip: Tensor | None = None, betas: tuple[float, float], eps: float, weight_decay: float, smallest: float,
    implementation: str = "auto",
) -> None:  # fmt: skip
    """`adamw_reference` of each of many tensors, in place, counted in `steps`, which are float32 scalars,
    as `largest` are.

    Nothing changes where the bool scalar `skip`, on the weights' device, is true; the host never waits for it.
    "auto" takes the Triton kernels if they can update all of the tensors, "triton" requires them, and "plain"
    does not use them.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    columns = (weights, grads, means, squares, steps, *([] if largest is None else [largest]))
    tensors: list[tuple[Tensor, ...]] = list(zip(*columns, strict=True))
    fused = implementation != "plain" and all(runs_fused(*each) for each in tensors)
    if implementation == "triton" and not fused:
        raise UserError(
            "implementation='triton' needs a CUDA GPU, Triton, and contiguous tensors in float16, bfloat16 or "
            "float32; use 'auto' or 'plain'"
        )
    options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "smallest": smallest}
    if not fused:
        for each in tensors:
            _plain(*each, lr=lr, skip=skip, **options)
        return
    from altup.kernels.adamw.triton import update
    from altup.kernels.multi_tensor import step_scalars, tensor_list

    alike = defaultdict(list)  # shapes do not matter to the kernels
    for each in tensors:
        alike[each[0].numel(), each[0].dtype, each[1].dtype, each[0].device].append(each)
    for (*_, device), group in alike.items():
        rate, skipped = step_scalars(lr, skip, device)
        lists = [tensor_list(column) for column in zip(*group, strict=True)]
        update(*lists, lr=rate, skip=skipped, **options)


def _plain(
    weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, largest: Tensor | None = None, *,
    skip: Tensor | None, **options: Any,
) -> None:  # fmt: skip
    dtype = torch.promote_types(weight.dtype, torch.float32)
    number = step.double() + 1  # because 1 - 0.999 has lost digits in float32
    new = adamw_reference(weight.to(dtype), grad.to(dtype), mean, square, number, largest=largest, **options)
    for tensor, value in zip((weight, mean, square, step), (*new, number), strict=True):
        tensor.copy_(value if skip is None else torch.where(skip, tensor, value))
