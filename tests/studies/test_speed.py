"""The comparison of speed: its arithmetic by hand, and that it tells a slow model from a fast one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from altup.bench import timing
from altup.studies import speed
from altup.studies.speed import measure_speed, ratio
from altup.training.engine import Engine
from altup.training.pretraining import PretrainConfig


def test_ratios_compare_steps_of_the_same_round() -> None:
    """The machine is ten times slower in the second half; each round still says 0.8."""
    assert ratio([1.25, 1.25, 1.25, 12.5, 12.5], [1.0, 1.0, 1.0, 10.0, 10.0]) == pytest.approx(0.8)


def test_one_disturbed_round_changes_nothing() -> None:
    assert ratio([2.0, 2.0, 100.0, 2.0, 2.0], [1.0] * 5) == 0.5


def test_one_round_is_enough() -> None:
    assert ratio([2.0], [1.0]) == 0.5


def test_a_deeper_model_is_slower(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a step moves on by as many seconds as the model has layers."""
    now, step = 0.0, Engine.step

    def slow_step(engine: Any, *arguments: Any) -> None:
        nonlocal now
        step(engine, *arguments)
        now += engine.plain.config.num_layers

    monkeypatch.setattr(Engine, "step", slow_step)

    def clock() -> float:
        nonlocal now
        now += 1e-9  # what is not a step takes some time too
        return now

    monkeypatch.setattr(timing.time, "perf_counter", clock)

    def config(layers: int) -> PretrainConfig:
        return PretrainConfig(
            data=str(data), size="tiny", model_overrides={"num_layers": layers}, batch_size=4, inputs_length=64
        )

    found = measure_speed({"shallow": config(1), "deep": config(4)}, 3, 2, 1, 2)
    assert [found[name]["train_seq_per_s"] for name in ("shallow", "deep")] == pytest.approx([4.0, 1.0])
    assert [found[name]["relative_speed"] for name in ("shallow", "deep")] == pytest.approx([1.0, 0.25])


@pytest.mark.parametrize("model", ["t5", "decoder"])
def test_generation_never_ends_early(data: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token would end a text, and yet as many are written as were asked for."""
    config = PretrainConfig(data=str(data), model=model, size="tiny", batch_size=2, inputs_length=32)
    passes: list[int] = []
    time = speed.time_in_turns

    def watch(works: dict[str, Any], *arguments: Any) -> dict[str, list[float]]:
        passes.clear()
        return time(works, *arguments)

    def fresh(*arguments: Any) -> Any:
        writes = speed_fresh(*arguments)
        writes.generation_config.eos_token_id = list(range(writes.config.vocab_size))
        writes.lm_head.register_forward_hook(lambda *_: passes.append(1))
        return writes

    speed_fresh = speed.fresh_model
    monkeypatch.setattr(speed, "fresh_model", fresh)
    monkeypatch.setattr(speed, "time_in_turns", watch)
    measure_speed({"": config}, rounds=2, steps=1, generate_batch=2, generate_tokens=5)
    assert len(passes) == (1 + 2) * 5


def test_a_bert_has_no_speed_of_generation(data: Path) -> None:
    config = PretrainConfig(data=str(data), model="bert", size="tiny", batch_size=2, inputs_length=32)
    found = measure_speed({"": config}, rounds=1, steps=1, generate_batch=1, generate_tokens=2)[""]
    assert "generate_ms" not in found
    assert found["forward_ms"] > 0
