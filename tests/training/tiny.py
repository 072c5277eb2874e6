"""A run small enough for tests: a T5 of a few thousand weights on made-up text, through the real loop.

`torchrun … tiny.py '[{"out": …, "resume": …, "settings": {…}}, …]'` makes one run after the other.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from altup.training.config import TrainConfig
from altup.training.loop import Loop, TrainOutcome
from altup.training.metrics import held_out_loss
from altup.training.optimizers.build import build_optimizer
from altup.training.optimizers.config import OptimizerConfig
from altup.training.parallel import ProcessGroup, join_process_group, leave
from altup.training.run_folder import RunFolder

SETTINGS: dict[str, Any] = {
    "steps": 12, "batch_size": 8, "lr": 0.02, "schedule": "constant", "precision": "fp32", "log_every": 3,
    "eval_every": 4, "save_every": 5, "keep_last": 3, "deterministic": True, "trackers": ["none"],
}  # fmt: skip
ALONE = ProcessGroup(0, 1, torch.device("cpu"))


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


class Fixed:
    """Thirteen held-out sequences, a number that no batch divides."""

    def __len__(self) -> int:
        return 13

    def examples(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return MadeUp(13, seed=1).examples(0, min(start, 13), min(stop, 13))


def optimizer_of(
    name: str, model: torch.nn.Module, *, lr: float | torch.Tensor, **settings: Any
) -> torch.optim.Optimizer:
    """An optimizer without the defaults of its name: no decay, and one rate for all parts."""
    number = float(lr)
    equal = {"weight_decay": 0.0, "lr_factors": {"embeddings": 1.0} if name == "muon" else {}}
    if "lr_factors" in settings:
        settings["lr_factors"] = {**equal["lr_factors"], **settings["lr_factors"]}
    config = OptimizerConfig(optimizer=name, lr=number, **(equal | settings))
    return build_optimizer(config, model, lr)


def build(checkpoint: Path | None = None, method: str = "altup", **fields: Any) -> torch.nn.Module:
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    if checkpoint is not None:
        return AltUpT5ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    shape = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 40}
    config = AltUpT5Config.from_preset("tiny", method, **{**shape, "dropout_rate": 0.1, "z_loss": 1e-4, **fields})
    return AltUpT5ForConditionalGeneration(config)


def stopping(after: int, **fields: Any) -> Callable[[Path | None], torch.nn.Module]:
    """`build`, with a model that sends its own process SIGTERM in its `after`-th training forward pass.

    Of several processes only the last one is sent the signal: all must stop together.
    """
    last = int(os.environ.get("RANK", 0)) + 1 == int(os.environ.get("WORLD_SIZE", 1))

    def build_stopping(checkpoint: Path | None) -> torch.nn.Module:
        model, passes = build(checkpoint, **fields), itertools.count(1)

        def hook(module: torch.nn.Module, args: Any) -> None:
            if module.training and next(passes) == after and last:
                os.kill(os.getpid(), signal.SIGTERM)

        model.register_forward_pre_hook(hook)
        return model

    return build_stopping


def tiny_loop(
    out: Path, process_group: ProcessGroup = ALONE, stop_after: int | None = None, **settings: Any
) -> Loop:
    """The loop over `MadeUp`, with held-out evaluation on another seed's sequences."""
    fields = settings.pop("model", {})
    make = functools.partial(build, **fields) if stop_after is None else stopping(stop_after, **fields)
    config = TrainConfig(**{**SETTINGS, **settings})
    return Loop(
        config,
        RunFolder(out),
        process_group,
        MadeUp(config.batch_size),
        make,
        None if stop_after else lambda checkpoint: build(None, **fields),
        lambda engine: held_out_loss(Fixed(), config.micro_batch or 8, process_group, engine.autocast),
    )


def run(out: Path, resume: bool = False, **settings: Any) -> TrainOutcome:
    return tiny_loop(out, **settings).run(resume)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_process_group() as process_group:
        for case in json.loads(sys.argv[1]):
            loop = tiny_loop(Path(case.pop("out")), process_group, **case.pop("settings"))
            loop.run(**case)
            del loop
            gc.collect()  # here, and not by a thread that reads ahead for the next run
    leave()
