"""The definition of the loss over a batch's tokens: cross-entropy, z-loss and accuracy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altup.core.errors import UserError

IGNORED = -100


class TokenSums(NamedTuple):
    """Sums over the tokens that count, as float32 scalars. `loss` is what to differentiate."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    tokens: Tensor


def token_sums(logits: Tensor, labels: Tensor, z_loss: float = 0.0, softcap: float | None = None) -> TokenSums:
    """Sums of −log p(label) + z_loss·(log Σ exp logits)², computed in float32.

    With `softcap` c, logits are bounded first, as Gemma has them: c·tanh(logits / c).

    logits: [..., vocabulary]; labels: [...], with −100 where a token does not count.
    """
    if logits.shape[:-1] != labels.shape:
        raise UserError(f"labels {list(labels.shape)} do not fit logits {list(logits.shape)}; give one a token")
    counts = labels != IGNORED
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    log_z = torch.logsumexp(wide, dim=-1)
    of_label = wide.gather(-1, labels.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    nll = torch.where(counts, log_z - of_label, 0.0).sum()
    loss = nll + z_loss * torch.where(counts, log_z.square(), 0.0).sum() if z_loss else nll
    correct = ((logits.argmax(dim=-1) == labels) & counts).sum()
    return TokenSums(loss, nll.detach(), correct.float(), counts.sum().float())
