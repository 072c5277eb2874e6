"""A tiny run over batches of which some cannot be learnt, so that the loss jumps: `spoiled.py OUT ddp`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altup.training.loop import Loop
from altup.training.parallel import ProcessGroup, join_process_group, leave
from tests.training.tiny import ALONE, MadeUp, tiny_loop

SETTINGS: dict[str, Any] = {
    "steps": 40, "log_every": 2, "eval_every": 40, "save_every": 5, "keep_last": 2, "on_spike": "skip",
}  # fmt: skip


@dataclass
class Spoiled(MadeUp):
    """Batches with labels that nobody can know; or those that are left if some are taken out."""

    bad: frozenset[int] = frozenset({32, 33})
    gap: tuple[int, int] = (10**9, 0)  # from where, and how many

    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        step += self.gap[1] if step >= self.gap[0] else 0
        found = super().examples(step, start, stop)
        if step in self.bad:
            labels = found["labels"]
            found["labels"] = np.where(labels == -100, labels, (labels * 7 + step) % 38 + 2).astype(labels.dtype)
        return found


def loop(out: Path, batches: MadeUp | None = None, group: ProcessGroup = ALONE, **changes: Any) -> Loop:
    made = tiny_loop(out, group, **{**SETTINGS, **changes})
    made.batches = batches or Spoiled()
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_process_group() as group:
        made = loop(Path(sys.argv[1]), group=group, parallel=sys.argv[2], model={"dropout_rate": 0.0})
        made.run()
        del made
    leave()
