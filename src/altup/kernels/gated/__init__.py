"""activation(gate) ⊙ linear, then dropout, in one pass forward and one backward: GEGLU and SwiGLU."""

from __future__ import annotations

from torch import Tensor

from altup.core.errors import UserError, check_choice, check_range
from altup.kernels.dropout import decisions, dropout
from altup.kernels.gated.reference import ACTIVATIONS, gated_reference
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["ACTIVATIONS", "gated", "gated_reference"]


def gated(
    h: Tensor,
    activation: str,
    p: float = 0.0,
    training: bool = True,
    implementation: str = "auto",
    *,
    per_sequence: bool = False,
) -> Tensor:
    """dropout(activation(gate) ⊙ linear) of h = [gate | linear], [..., 2·n] → [..., n].

    activation: "gelu" (its tanh form) or "silu". Computed in float32 and rounded once. implementation: "triton",
    the kernels, on Ampere GPUs or later; "plain"; "auto", the kernels where they run. They keep what
    `altup.kernels.dropout` would keep under the same seed. per_sequence: as of `dropout`.
    """
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_range("p", p, 0, 1)
    fits = h.dtype in FUSED_DTYPES and h.shape[-1] % 2 == 0 and h.numel() > 0
    if implementation == "auto":
        implementation = "triton" if fits and runs_triton(h.device) else "plain"
    if implementation == "plain":
        return dropout(gated_reference(h, activation), p, training, per_sequence=per_sequence)
    if not (fits and can_launch(h.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton and rows of [gate | linear] in 16 or 32 bits, not "
            f"{h.dtype} {list(h.shape)} on {h.device}; use 'auto' or 'plain'"
        )
    from altup.kernels.gated.triton import gated_op

    drops = training and p > 0
    seed = decisions(h[..., : h.shape[-1] // 2], p, per_sequence) if drops else None
    return gated_op(h.contiguous(), seed, p if drops else 0.0, activation)
