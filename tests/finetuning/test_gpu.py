"""Fine-tuning on a CUDA GPU: little time is lost to packing, masks and dropout."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from altup.data.tasks.examples import Tokens
from altup.finetuning.config import FinetuneConfig
from altup.finetuning.learning.seq2seq import choose_packing
from altup.finetuning.mixture import Mixture, TrainingTask
from altup.models.t5.config import AltUpT5Config
from altup.training.config import TrainConfig
from altup.training.engine import Engine, numerics
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import StepBatch, assemble, to_tensors

pytestmark = pytest.mark.gpu

VOCABULARY = 32_128
STEPS, ROUNDS = 20, 4
EXAMPLES = 192  # about as many tokens as 64 rows of pretraining have


def random_rows(lengths: np.ndarray, seed: int) -> Tokens:
    flat = np.random.default_rng(seed).integers(3, VOCABULARY, int(lengths.sum()), dtype=np.int32)
    return Tokens(flat, lengths.cumsum(), 0)


def like_squad(examples: int) -> TrainingTask:
    """Inputs of about 205 tokens and some of 512; answers of about 6, and some of 40."""
    draw = np.random.default_rng(0)
    inputs = np.clip(draw.lognormal(5.25, 0.4, examples), 30, 512).astype(np.int64)
    targets = np.clip(draw.lognormal(1.5, 0.6, examples), 2, 40).astype(np.int64)
    return TrainingTask("made up", random_rows(inputs, 1), random_rows(targets, 2))


def build(dropout: float) -> Any:
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    torch.manual_seed(0)
    return AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("base", "altup", dropout_rate=dropout))


class Run:
    """Steps of one kind; `speed` is in tokens a second that are not padding."""

    def __init__(
        self, config: TrainConfig, dropout: float, batches: list[StepBatch], process_group: ProcessGroup
    ) -> None:
        self.engine = Engine(build(dropout), config, process_group)
        self.batches: Iterator[StepBatch] = itertools.cycle(batches)
        self.count = 0
        self.work(len(batches) + 2)

    def work(self, steps: int) -> float:
        tokens = 0
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for batch in itertools.islice(self.batches, steps):
            self.engine.step(self.count, batch, batch.tokens)
            tokens += batch.tokens + batch.inputs
            self.count += 1
        torch.cuda.synchronize()
        return tokens / (time.perf_counter() - begun)


@pytest.mark.parametrize(
    ("fields", "layout"),
    [({}, "wide"), ({"precision": "fp32"}, "narrow"), ({"deterministic": True}, "narrow")],
)
def test_rows_are_wide_where_the_kernels_attend(fields: dict[str, Any], layout: str, tmp_path: Path) -> None:
    AltUpT5Config.from_preset("small", "altup").save_pretrained(tmp_path)
    config = FinetuneConfig(model="made up", tasks=["squad"], **fields)
    assert choose_packing(str(tmp_path), config, torch.device("cuda", 0)) == layout


def test_a_step_keeps_the_speed_of_pretraining_for_each_token() -> None:
    """Base, AltUp: packed examples like SQuAD's with dropout, and full rows of pretraining without, in turns."""
    process_group = ProcessGroup(0, 1, torch.device("cuda", 0))
    shared: dict[str, Any] = {"steps": 10_000, "precision": "bf16"}
    full = {
        "input_ids": np.random.default_rng(3).integers(3, VOCABULARY, (64, 512)),
        "labels": np.random.default_rng(4).integers(3, VOCABULARY, (64, 114)),
    }
    pretraining = [StepBatch([to_tensors(full, process_group)], full["labels"].size, full["input_ids"].size)]
    mixture = Mixture([like_squad(5_000)], [5_000], EXAMPLES, 0, packing="wide")
    packed = [assemble(mixture, EXAMPLES, process_group, step) for step in range(STEPS)]
    shapes = {batch.micro[0]["input_ids"].shape for batch in packed}

    with numerics(False, True):
        begun = time.perf_counter()
        runs = [Run(TrainConfig(batch_size=64, **shared), 0.0, pretraining, process_group)]
        middle = time.perf_counter()
        runs.append(
            Run(
                FinetuneConfig(model="made up", tasks=["squad"], batch_size=EXAMPLES, **shared),
                0.1,
                packed,
                process_group,
            )
        )
        end = time.perf_counter()
        speeds = np.median([[run.work(STEPS) for run in runs] for _ in range(ROUNDS)], axis=0)
    print(
        f"tokens a second: pretraining {speeds[0]:,.0f}, fine-tuning {speeds[1]:,.0f} "
        f"({speeds[1] / speeds[0]:.1%}); "
        f"ready after {middle - begun:.0f} s and {end - middle:.0f} s ({len(shapes)} shapes: {sorted(shapes)})"
    )
    assert speeds[1] >= 0.9 * speeds[0]
