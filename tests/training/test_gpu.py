"""The loop on a CUDA GPU: exact resume, no waiting for the device, and little time beside the model itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.training.config import TrainConfig
from altup.training.engine import Engine
from altup.training.parallel import Processes
from altup.training.prefetch import assemble
from altup.training.pretraining import PretrainConfig, pretrain
from tests.training.compare import assert_same_run
from tests.training.tiny import SETTINGS, MadeUp, build, run, tiny_loop
from tests.training.verbs import prepare_text

pytestmark = pytest.mark.gpu


def gpu() -> Processes:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return Processes(0, 1, torch.device("cuda", 0))


class StopAt:
    """Sends SIGTERM with the record of a step, outside of what is compiled."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, values: dict[str, Any]) -> None:
        if values["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("compiled", [False, True])
def test_resume_is_exact(tmp_path: Path, compiled: bool) -> None:
    mine = gpu()
    settings: dict[str, Any] = {"precision": "bf16", "micro_batch": 4, "compile": compiled, "mine": mine}
    run(tmp_path / "whole", **settings)
    loop = tiny_loop(tmp_path / "cut", **settings)
    loop.sinks = [StopAt(6)]
    assert loop.run().step == 6
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_a_step_waits_for_nothing(optimizer: str) -> None:
    """PyTorch raises at any operation that would make the host wait for the device."""
    mine = gpu()
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "clip_norm": 1.0, "compile": False}
    engine = Engine(build(), TrainConfig(**{**settings, "optimizer": optimizer}), mine)
    batches = MadeUp()
    for step in range(5):
        batch = assemble(batches, 4, mine, step)
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.step(step, batch, batch.tokens)
        finally:
            if step == 4:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_sync_debug_mode("default")
    assert engine.meter.read(mine)["steps"] == 5


def test_the_loop_keeps_the_speed_of_the_bare_step(tmp_path: Path) -> None:
    """Base size: data, skipping, metrics, logging and all keep 95 % of forward, backward and optimizer alone."""
    mine = gpu()
    number = 60
    config = PretrainConfig(
        data=str(prepare_text(tmp_path)),
        size="base",
        method="altup",
        model_overrides={"vocab_size": 32128},
        batch_size=64,
        steps=3 * number,
        log_every=number,
        eval_every=10**6,
        save_every=10**6,
        eval_sequences=1,
    )
    pretrain(config, tmp_path / "run")
    from altup.training.metrics import read_records

    ours = [r["seq_per_s"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["split"] == "train"][-1]

    engine = Engine(build_base(), config, mine)
    batch = {
        "input_ids": torch.randint(3, 32000, (64, 512), device=mine.device),
        "labels": torch.randint(3, 32000, (64, 114), device=mine.device),
    }
    for step in range(2 * number):
        if step == number:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        with engine.autocast():
            loss = engine.model(**batch, return_logits=False).loss_sum / (64 * 114)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    bare = number * 64 / (time.perf_counter() - begun)
    print(f"loop {ours:.1f} sequences a second, bare step {bare:.1f}: {ours / bare:.1%}")
    assert ours >= 0.95 * bare


def build_base() -> torch.nn.Module:
    from altup.models.t5.config import AltUpT5Config
    from altup.models.t5.model import AltUpT5ForConditionalGeneration

    return AltUpT5ForConditionalGeneration(AltUpT5Config.from_preset("base", "altup", z_loss=1e-4))
