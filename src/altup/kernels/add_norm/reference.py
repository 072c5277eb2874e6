"""The definition of a residual addition and the norm behind it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from altup.kernels.dropout.reference import is_kept, keep_scale, stream_keys, stream_words


def add_norm_reference(
    x: Tensor, update: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """s = x + dropout(update) and s / √(mean(s²) + ε) · weight in x's dtype, computed in float32 or better.

    x, update: [..., d]; weight: [d]; keep: which numbers of the update dropout keeps, bool [..., d].
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dropped = update.to(wide) if keep is None else update.to(wide) * keep * keep_scale(p)
    total = (x.to(wide) + dropped).to(x.dtype)
    scale = torch.rsqrt(total.to(wide).square().mean(dim=-1, keepdim=True) + eps)
    return total, (total.to(wide) * scale * weight).to(x.dtype)


def kept_in_fours(numel: int, seed: int, p: float) -> Tensor:
    """Which of `numel` numbers in a row the kernel keeps under a seed: the counter n gives two words for
    the numbers 4·n to 4·n + 3, a half each, the lower first."""
    offset = torch.arange(numel)
    stream = stream_keys(seed, torch.zeros((), dtype=torch.long))
    words = stream_words(stream, offset // 4 & 0xFFFFFFFF, offset // 4 >> 32)
    word = torch.where(offset % 4 < 2, words[0], words[1])
    return is_kept(torch.where(offset % 2 == 0, word & 0xFFFF, word >> 16), p)
