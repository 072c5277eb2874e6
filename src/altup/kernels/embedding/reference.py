"""The definition of the gradient of an embedding table, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def table_gradient_reference(grad: Tensor, ids: Tensor, words: int) -> Tensor:
    """d_table[w] = Σ grad[n] over the positions n with ids[n] = w, summed in float32 or better.

    grad: [n, d]; ids: [n] → [words, d] in grad's dtype.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.new_zeros(words, grad.shape[1], dtype=wide).index_add_(0, ids, grad.to(wide)).to(grad.dtype)
