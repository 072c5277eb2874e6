"""The loss over a batch's tokens: from logits, or from the hidden states without ever holding all logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from altup.core.errors import UserError, check_choice
from altup.kernels.cross_entropy.op import fused_head
from altup.kernels.cross_entropy.reference import IGNORED, TokenSums, token_sums
from altup.kernels.launch import FUSED_DTYPES, IMPLEMENTATIONS, can_launch, runs_triton

__all__ = ["IGNORED", "TokenSums", "head_sums", "token_sums"]


def head_sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float = 0.0,
    softcap: float | None = None,
    *,
    implementation: str = "auto",
) -> TokenSums:
    """`token_sums(hidden·weightᵀ, labels, z_loss, softcap)`, which `triton` finds without holding all logits.

    hidden: [..., D], weight: [V, D], labels: [...]. Works in the dtype of `hidden`, or autocast's: `weight` may be
    a float32 master, and its gradient comes back in its own dtype. `auto` takes `triton` on GPUs that run bf16.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        raise UserError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not "
            "fit; give [..., D], [V, D] and [...]"
        )
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap={softcap} bounds the logits, so it must be above 0; None is no bound")
    fits = hidden.dtype in FUSED_DTYPES
    if implementation == "auto":
        implementation = "triton" if fits and runs_triton(hidden.device) else "plain"
    if implementation == "plain":
        return token_sums(F.linear(hidden, weight.to(hidden.dtype)), labels, z_loss, softcap)
    if not (fits and can_launch(hidden.device)):
        raise UserError(
            f"implementation='triton' needs a CUDA GPU, Triton, and float16, bfloat16 or float32, not "
            f"{hidden.dtype} on {hidden.device}; use 'auto' or 'plain'"
        )
    training = torch.is_grad_enabled()
    sums, _, _ = fused_head(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        z_loss,
        softcap or 0.0,
        training and hidden.requires_grad,
        training and weight.requires_grad,
    )
    loss, nll, correct = sums.unbind()
    return TokenSums(loss, nll.detach(), correct.detach(), (labels != IGNORED).sum().float())
