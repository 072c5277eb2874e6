"""torch's AdamW with a step that can be skipped on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """Fused AdamW. Its kernels leave weights and state alone where `found_inf` is 1, as torch's GradScaler
    uses them; `skip` takes that way. State of a parameter: `step`, `exp_avg`, `exp_avg_sq`."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }

    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """One update; where the bool scalar `skip` is true, none of weights and state."""
        self.found_inf = None if skip is None else skip.float()
        super().step()
