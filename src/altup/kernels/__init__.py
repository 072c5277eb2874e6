"""The hot operations, one folder each, all of the same plan:

- `reference.py`: the definition in plain PyTorch, against which everything fast is compared;
- `triton.py` (for attention and Gemma 3n several files): the Triton kernels and, by `operators.py`, PyTorch's
  operators made of them, with their gradients, opaque to `torch.compile`;
- `__init__.py`: the one function that picks the fastest correct way. Triton is imported when it picks the kernels.
"""

from altup.kernels.adafactor import adafactor_reference, adafactor_update
from altup.kernels.adamw import adamw_reference, adamw_update
from altup.kernels.altup_update import altup_update, altup_update_reference
from altup.kernels.altup_update_dynamic import altup_update_dynamic, altup_update_dynamic_reference
from altup.kernels.attention import attention, attention_reference
from altup.kernels.cross_entropy import TokenSums, head_sums, token_sums
from altup.kernels.dropout import dropout
from altup.kernels.muon import muon_reference, muon_update
from altup.kernels.sequence_update import sequence_update, sequence_update_reference

__all__ = [
    "TokenSums",
    "adafactor_reference",
    "adafactor_update",
    "adamw_reference",
    "adamw_update",
    "altup_update",
    "altup_update_dynamic",
    "altup_update_dynamic_reference",
    "altup_update_reference",
    "attention",
    "attention_reference",
    "dropout",
    "head_sums",
    "muon_reference",
    "muon_update",
    "sequence_update",
    "sequence_update_reference",
    "token_sums",
]
