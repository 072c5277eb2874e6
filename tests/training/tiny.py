"""A run small enough for tests: a T5 of a few thousand weights on made-up text, through the real loop.

`python tiny.py OUT '{"steps": 10}' [--resume]` runs it as a process of its own, under torchrun too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altup.training.config import TrainConfig
from altup.training.heldout import held_out
from altup.training.loop import Loop, Outcome
from altup.training.parallel import Processes, processes
from altup.training.run import RunFolder

SETTINGS: dict[str, Any] = {
    "steps": 12, "batch_size": 8, "lr": 0.02, "schedule": "constant", "precision": "fp32", "log_every": 3,
    "eval_every": 4, "save_every": 5, "keep_last": 3, "deterministic": True,
}  # fmt: skip
ALONE = Processes(0, 1, torch.device("cpu"))


@dataclass
class MadeUp:
    """Sequences that count upwards from a random start: learnable, and a pure function of (seed, step, position).

    Every third label of odd examples is ignored, so that micro-batches hold different numbers of labels.
    An epoch has 40 sequences.
    """

    batch_size: int = 8
    seed: int = 0
    vocabulary: int = 40
    sequences_per_epoch: int = 40

    def examples(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        rows = []
        for position in range(start, stop):
            index = (step * self.batch_size + position) % self.sequences_per_epoch
            first = int(np.random.default_rng((self.seed, index)).integers(self.vocabulary))
            rows.append((first + np.arange(18)) % (self.vocabulary - 2) + 2)
        tokens = np.array(rows, dtype=np.int32).reshape(-1, 18)
        labels = tokens[:, 12:].copy()
        labels[(np.arange(start, stop) % 2 == 1), ::3] = -100
        return {"input_ids": tokens[:, :12], "labels": labels}

    def describe(self) -> dict[str, Any]:
        return {"made_up": True, "seed": self.seed}


def build(checkpoint: Path | None, method: str = "altup", **fields: Any) -> torch.nn.Module:
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    if checkpoint is not None:
        return AltUpT5ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 40}
    config = AltUpT5Config.from_preset("tiny", method, **{**shape, "dropout_rate": 0.1, "z_loss": 1e-4, **fields})
    return AltUpT5ForConditionalGeneration(config)


def tiny_loop(out: Path, mine: Processes = ALONE, **settings: Any) -> Loop:
    """The loop over `MadeUp`, with held-out evaluation on another seed's sequences."""
    config = TrainConfig(**{**SETTINGS, **settings})
    return Loop(
        config,
        RunFolder(out),
        mine,
        MadeUp(config.batch_size),
        build,
        lambda engine: held_out(MadeUp(8, seed=1), 2, 8, mine, engine.autocast),
    )


def run(out: Path, resume: bool = False, **settings: Any) -> Outcome:
    return tiny_loop(out, **settings).run(resume)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with processes() as mine:
        tiny_loop(Path(sys.argv[1]), mine, **json.loads(sys.argv[2])).run("--resume" in sys.argv)
