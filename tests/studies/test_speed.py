"""The comparison of speed: its arithmetic by hand, and that it tells a slow model from a fast one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from altup.studies.speed import Speed, _subjects, compare_speed, measure_speed, summarise
from altup.training.pretraining import PretrainConfig
from tests.training.verbs import prepare_text


def test_ratios_compare_steps_of_the_same_round() -> None:
    """The machine is ten times slower in the second half; each round still says 0.8."""
    dense = [1.0, 1.0, 1.0, 10.0, 10.0]
    other = [1.25, 1.25, 1.25, 12.5, 12.5]
    assert summarise(other, dense, 16) == Speed(16 / 1.25, *[pytest.approx(0.8)] * 3)


def test_one_disturbed_round_changes_little() -> None:
    speed = summarise([2.0, 2.0, 100.0, 2.0, 2.0], [1.0] * 5, 8)
    assert (speed.seq_per_s, speed.relative, speed.low, speed.high) == (4.0, 0.5, 0.5, 0.5)


def test_one_round_is_enough() -> None:
    assert summarise([2.0], [1.0], 8) == Speed(4.0, 0.5, 0.5, 0.5)


def test_a_deeper_model_is_slower(tmp_path: Path) -> None:
    data = prepare_text(tmp_path)

    def config(layers: int) -> PretrainConfig:
        return PretrainConfig(
            data=str(data), size="tiny", model_overrides={"num_layers": layers}, batch_size=4, inputs_length=64
        )

    speeds = compare_speed({"shallow": config(1), "deep": config(8)}, rounds=3, steps=1)
    assert speeds["shallow"].relative == 1.0
    assert speeds["deep"].relative < 0.7
    assert speeds["deep"].seq_per_s < speeds["shallow"].seq_per_s


@pytest.mark.parametrize("model", ["t5", "decoder"])
def test_generation_never_ends_early(tmp_path: Path, model: str) -> None:
    """Every token would end a text, and yet as many are written as were asked for."""
    data = str(prepare_text(tmp_path))
    config = PretrainConfig(data=data, model=model, size="tiny", batch_size=2, inputs_length=32)
    with _subjects({"": config}) as subjects:
        writes: Any = subjects[""]._engine.plain
        writes.generation_config.eos_token_id = list(range(writes.config.vocab_size))
        passes: list[int] = []
        writes.lm_head.register_forward_hook(lambda *_: passes.append(1))
        subjects[""].writer(batch=2, tokens=5)(1)
    assert len(passes) == 5


def test_a_bert_has_no_speed_of_generation(tmp_path: Path) -> None:
    config = PretrainConfig(
        data=str(prepare_text(tmp_path)), model="bert", size="tiny", batch_size=2, inputs_length=32
    )
    found = measure_speed({"": config}, rounds=1, steps=1, generate_batch=1, generate_tokens=2)[""]
    assert found.generate is None
    assert found.forward_ms > 0
