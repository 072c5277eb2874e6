"""One layer's update of the wide state, Algorithm 1 of the paper, in one pass:

    x_newⁱ = x̂ⁱ + gᵢ (y − x̂ᵃ)      =      Σⱼ Mᵢⱼ xʲ + gᵢ y      with M = P − g ⊗ P[a].

The left-hand form is the definition (`reference.py`); the right-hand one reads and writes the wide state once.
Sums run in float32 (float64 for float64 states), whatever the state's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.altup_update.reference import altup_update_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = [
    "FUSED_BLOCKS",
    "State",
    "altup_update",
    "altup_update_reference",
    "check_triton",
]

State = Tensor | Sequence[Tensor]

FUSED_BLOCKS = 8  # the most that kernels take


def altup_update(
    x: State,
    y: Tensor,
    P: Tensor,
    g: Tensor,
    active: int,
    residual: Tensor | None = None,
    implementation: str = "auto",
) -> State:
    """x_new = M·x + g ⊗ (residual + y): `altup_update_reference` and, before it, a layer's last residual add.

    x: [K, ..., d], or K blocks [..., d] as a tuple or list, which gives a tuple; y, residual: [..., d];
    P: [K, K], g: [K]. "auto" takes the Triton kernels on CUDA GPUs where they can run, "triton" requires them,
    and "plain" does not use them.
    """
    if implementation != "auto":
        check_choice("implementation", implementation, IMPLEMENTATIONS)
    parts = [x] if isinstance(x, Tensor) else x
    _check_shapes(x, parts, y, P, g, active, residual)
    if residual is not None and residual.dtype != y.dtype:
        y, residual = residual + y, None
    fits = len(x) <= FUSED_BLOCKS and parts[0].dtype in FUSED_DTYPES and y.dtype in FUSED_DTYPES
    if implementation == "triton":
        check_triton(fits, parts[0], y)
    fuses = implementation == "auto" and fits and runs_triton(y.device) and not _is_fused_by_the_compiler()
    if fuses or implementation == "triton":
        from altup.kernels.altup_update.triton import update

        new = update(list(parts), y, residual, P.float(), g.float(), active)
        return new[0] if isinstance(x, Tensor) else tuple(new)
    return _plain(x, y, P, g, active, residual)


def _is_fused_by_the_compiler() -> bool:
    """Without gradients the update is a sum like any other, which `torch.compile` does together with the norm
    behind it. What it makes of the gradients is slower than the kernels."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


def _plain(x: State, y: Tensor, P: Tensor, g: Tensor, active: int, residual: Tensor | None) -> State:
    P, g = (c.to(torch.promote_types(c.dtype, torch.float32)) for c in (P, g))  # FSDP2 may have rounded them
    M = P - torch.outer(g, P[active])
    dtype = torch.promote_types(x[0].dtype, torch.float32)
    y = y.to(dtype) if residual is None else residual.to(dtype) + y
    if y.device.type == "cpu" and x[0].dtype == M.dtype and not torch.compiler.is_compiling():
        # One skinny matrix product is the quickest eager way on a CPU. Autocast would round the coefficients.
        with torch.autocast("cpu", enabled=False):
            stacked = x if isinstance(x, Tensor) else torch.stack(list(x))
            mixed = (M @ stacked.reshape(len(stacked), -1)).view(stacked.shape)
            new = mixed + g.view(-1, *[1] * y.dim()) * y
            return new if isinstance(x, Tensor) else new.unbind(0)
    blocks = [block.to(dtype) for block in x]
    rows = []
    for i in range(len(blocks)):
        row = g[i] * y
        for j, block in enumerate(blocks):
            row = row + M[i, j] * block
        rows.append(row.to(x[0].dtype))
    return torch.stack(rows) if isinstance(x, Tensor) else tuple(rows)


def _check_shapes(
    x: State, parts: Sequence[Tensor], y: Tensor, P: Tensor, g: Tensor, active: int, residual: Tensor | None
) -> None:
    """The kernels see flat arrays and cannot check shapes, so it is done here."""
    K = len(x)
    if P.shape != (K, K) or g.shape != (K,) or not 0 <= active < K:
        raise UserError(f"P {list(P.shape)}, g {list(g.shape)}, active={active} do not fit a state of {K} blocks")
    shape, dtype, device = y.shape if parts is x else (K, *y.shape), parts[0].dtype, y.device
    for part in parts:
        if part.shape != shape or part.dtype != dtype or part.device != device:
            found = ", ".join(f"{list(part.shape)} {part.dtype} on {part.device}" for part in parts)
            raise UserError(f"a state of {found} does not fit the layer's output {list(y.shape)} on {y.device}")
    if residual is not None and residual.shape != y.shape:
        raise UserError(f"residual {list(residual.shape)} does not fit the layer's output {list(y.shape)}")


def check_triton(fits: bool, block: Tensor, y: Tensor) -> None:
    if not fits:
        raise UserError(
            f"implementation='triton' takes up to {FUSED_BLOCKS} blocks in float16, bfloat16 or float32, not "
            f"{block.dtype} with {y.dtype}; use 'auto' or 'plain'"
        )
    if not can_launch(y.device):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU and Triton, not {y.device}; use 'auto' or 'plain'"
        )
