"""The hot operations: each a plain PyTorch definition, and one function that picks the fastest correct way."""

from altup.kernels.altup_update import altup_update, altup_update_reference
from altup.kernels.attention import attention
from altup.kernels.cross_entropy import TokenSums, head_sums, token_sums
from altup.kernels.dropout import dropout
from altup.kernels.sequence_update import sequence_update, sequence_update_reference

__all__ = [
    "TokenSums",
    "altup_update",
    "altup_update_reference",
    "attention",
    "dropout",
    "head_sums",
    "sequence_update",
    "sequence_update_reference",
    "token_sums",
]
