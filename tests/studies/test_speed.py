"""The comparison of speed: its arithmetic by hand, and that it tells a slow model from a fast one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from altup.bench import timing
from altup.studies.speed import Speed, _subjects, compare_training, measure_speed, summarise
from altup.training.engine import Engine
from altup.training.pretraining import PretrainConfig


def test_ratios_compare_steps_of_the_same_round() -> None:
    """The machine is ten times slower in the second half; each round still says 0.8."""
    dense = [1.0, 1.0, 1.0, 10.0, 10.0]
    other = [1.25, 1.25, 1.25, 12.5, 12.5]
    assert summarise(other, dense, 16) == Speed(16_000 / 1.25, *[pytest.approx(0.8)] * 3)


def test_one_disturbed_round_changes_little() -> None:
    speed = summarise([2.0, 2.0, 100.0, 2.0, 2.0], [1.0] * 5, 8)
    assert (speed.seq_per_s, speed.relative, speed.low, speed.high) == (4000.0, 0.5, 0.5, 0.5)


def test_one_round_is_enough() -> None:
    assert summarise([2.0], [1.0], 8) == Speed(4000.0, 0.5, 0.5, 0.5)


def test_a_deeper_model_is_slower(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a step moves on by as many seconds as the model has layers."""
    now, step = 0.0, Engine.step

    def slow_step(engine: Any, *arguments: Any) -> None:
        nonlocal now
        step(engine, *arguments)
        now += engine.plain.config.num_layers

    monkeypatch.setattr(Engine, "step", slow_step)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)

    def config(layers: int) -> PretrainConfig:
        return PretrainConfig(
            data=str(data), size="tiny", model_overrides={"num_layers": layers}, batch_size=4, inputs_length=64
        )

    speeds = compare_training({"shallow": config(1), "deep": config(4)}, rounds=3, steps=2)
    assert speeds == {"shallow": Speed(4.0, 1.0, 1.0, 1.0), "deep": Speed(1.0, 0.25, 0.25, 0.25)}


@pytest.mark.parametrize("model", ["t5", "decoder"])
def test_generation_never_ends_early(data: Path, model: str) -> None:
    """Every token would end a text, and yet as many are written as were asked for."""
    config = PretrainConfig(data=str(data), model=model, size="tiny", batch_size=2, inputs_length=32)
    with _subjects({"": config}) as subjects:
        writes = subjects.models[""]._model
        writes.generation_config.eos_token_id = list(range(writes.config.vocab_size))
        passes: list[int] = []
        writes.lm_head.register_forward_hook(lambda *_: passes.append(1))
        subjects.time("generate", 2, 1, 2, 5)
    assert len(passes) == (1 + 2) * 5


def test_a_bert_has_no_speed_of_generation(data: Path) -> None:
    config = PretrainConfig(data=str(data), model="bert", size="tiny", batch_size=2, inputs_length=32)
    found = measure_speed({"": config}, rounds=1, steps=1, generate_batch=1, generate_tokens=2)[""]
    assert found.generate is None
    assert found.forward_ms > 0
