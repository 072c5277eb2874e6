"""The loop on a CUDA GPU: exact resume, no waiting for the device, and little time beside the model itself."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from altup.data.batches import ShardBatches
from altup.data.objectives import SpanCorruption
from altup.data.shards import TokenStream
from altup.training.config import TrainConfig
from altup.training.engine import Engine, numerics
from altup.training.loop import Loop
from altup.training.metrics import read_records
from altup.training.parallel import ProcessGroup
from altup.training.prefetch import assemble, to_tensors
from altup.training.pretraining import PretrainConfig, build_model
from altup.training.run_folder import RunFolder
from tests.processes import prepare_text
from tests.training.compare import assert_same_run
from tests.training.tiny import SETTINGS, MadeUp, build, run, tiny_loop

pytestmark = pytest.mark.gpu


def gpu() -> ProcessGroup:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return ProcessGroup(0, 1, torch.device("cuda", 0))


class StopAt:
    """Sends SIGTERM with the record of a step, outside of what is compiled."""

    def __init__(self, step: int) -> None:
        self.step = step

    def record(self, values: dict[str, Any]) -> None:
        if values["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def test_layers_that_do_not_compile_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process_group = gpu()
    torch._dynamo.reset()
    run(tmp_path / "whole", precision="bf16", process_group=process_group)
    assert "gave up" not in capfd.readouterr().err
    torch._dynamo.reset()  # hooks are not guarded: the code of the first model would serve the second
    loop = tiny_loop(tmp_path / "broken", precision="bf16", process_group=process_group)
    whole = loop.build_model

    def with_a_hook(checkpoint: Path | None) -> Any:
        model: Any = whole(checkpoint)
        model.encoder.layers[0].feed_forward.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        return model

    loop.build_model = with_a_hook
    loop.run()
    assert capfd.readouterr().err.count("torch.compile gave up") == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_resume_is_exact(tmp_path: Path, compiled: bool) -> None:
    process_group = gpu()
    settings: dict[str, Any] = {
        "precision": "bf16",
        "micro_batch": 4,
        "compile": compiled,
        "process_group": process_group,
    }
    run(tmp_path / "whole", **settings)
    loop = tiny_loop(tmp_path / "cut", **settings)
    loop.sinks = [StopAt(6)]
    assert loop.run().step == 6
    run(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 12)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_a_step_waits_for_nothing(optimizer: str) -> None:
    """PyTorch raises at any operation that would make the host wait for the device."""
    process_group = gpu()
    settings = {**SETTINGS, "precision": "bf16", "deterministic": False, "clip_norm": 1.0, "compile": False}
    engine = Engine(build(), TrainConfig(**{**settings, "optimizer": optimizer}), process_group)
    batches = MadeUp()
    try:
        for step in range(5):
            batch = assemble(batches, 4, process_group, step)
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            engine.step(step, batch, batch.tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.meter.read(process_group)["steps"] == 5


def test_the_loop_keeps_the_speed_of_the_bare_step(tmp_path: Path) -> None:
    """Base size: data, skipping, metrics, logging and all keep 95 % of forward, backward and optimizer alone."""
    process_group = gpu()
    number = 60
    config = PretrainConfig(
        data=str(prepare_text(tmp_path)),
        size="base",
        method="altup",
        model_overrides={"vocab_size": 32128},
        batch_size=64,
        steps=3 * number,
        log_every=number,
        save_every=10**6,
    )
    text = TokenStream(Path(config.data), "train")
    objective = SpanCorruption(text.vocabulary.sentinels, text.vocabulary.eos)
    batches = ShardBatches(text, objective, config.batch_size)
    model = functools.partial(build_model, config.model, config.model_config(text.vocabulary))
    engines: list[Engine] = []
    loop = Loop(
        config=config,
        folder=RunFolder(tmp_path / "run"),
        process_group=process_group,
        batches=batches,
        build_model=model,
        make_evaluate=engines.append,
    )
    loop.run()
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    ours = [record["seq_per_s"] for record in records if record["split"] == "train"][-1]

    (engine,) = engines
    examples = to_tensors(batches.examples(0, 0, config.batch_size), process_group)
    batch = {name: tensor.to(process_group.device) for name, tensor in examples.items()}
    one = torch.ones((), device=process_group.device)

    def launched() -> None:
        with engine.autocast():
            loss = engine.plain(**batch, return_logits=False).loss_sum / (64 * 114)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)

    def replayed() -> None:
        engine._graphs(batch, one / (64 * 114))
        engine._graphs.update()

    bare = 0.0
    with numerics(config.deterministic, True):
        for way in (launched, replayed):
            for step in range(2 * number):
                if step == number:
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                way()
            torch.cuda.synchronize()
            speed = number * 64 / (time.perf_counter() - begun)
            print(f"loop {ours:.1f} sequences a second, bare {way.__name__} step {speed:.1f}: {ours / speed:.1%}")
            bare = max(bare, speed)
    assert ours >= 0.95 * bare
