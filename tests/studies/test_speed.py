"""The comparison of speed: its arithmetic by hand, and that it tells a slow model from a fast one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from altup.bench import timing
from altup.studies.results import read_results
from altup.studies.run import StudyRun
from altup.studies.scale import find_scale
from altup.studies.speed import Speed, _subjects, compare_training, measure_speed, summarise
from altup.studies.study import find_study
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


def run_script(study: Path, data: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    arguments = [str(study), "--scale", "smoke", "--data", str(data), "--rounds", "1", "--steps", "1", *flags]
    monkeypatch.setattr("sys.argv", ["study_speeds.py", *arguments])
    importlib.import_module("study_speeds").main()


SPEEDS = """
title: Speeds
question: How fast are they?
rows:
  Dense: {method: dense}
  Dense, 4 layers: {method: dense, extra_layers: 1}
  "Dense, its time": {method: dense, time_of: "Dense, 4 layers"}
measures: [loss]
"""


def test_a_study_may_have_the_line_that_the_script_prints(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every row, also those whose labels have commas."""
    study = tmp_path / "speeds.yaml"
    study.write_text(SPEEDS)
    run_script(study, data, monkeypatch)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("speeds:")]
    study.write_text(f"{SPEEDS}{line}\n")
    speeds = find_study(str(study)).speeds
    assert list(speeds) == ["Dense", "Dense, 4 layers", "Dense, its time"]
    assert speeds["Dense"] == 1


def test_a_study_finds_the_speeds_that_the_script_has_added_to_its_results(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the steps of equal time are known, and nothing is measured again. One row brings the baseline along."""
    path, results = tmp_path / "speeds.yaml", tmp_path / "results"
    path.write_text(SPEEDS)
    run_script(path, data, monkeypatch, "--results", str(results), "--only", "Dense, 4 layers")
    run = StudyRun(
        [find_study(str(path))],
        find_scale("smoke"),
        tmp_path / "out",
        results,
        [1],
        data=str(data),
        finetune=False,
    )
    plan = run.plan()
    assert (plan.speed, [trial.label for trial in plan.trials if trial.waits]) == ([], [])
    found = {(r.label, r.metric): r.value for r in read_results(results)}
    assert set(found) == {
        (label, m) for label in ("Dense", "Dense, 4 layers") for m in ("train_seq_per_s", "relative_speed")
    }
    steps = {t.label: t.pretrain.steps for t in plan.trials if t.pretrain}
    ratio = found["Dense, 4 layers", "relative_speed"]
    assert steps["Dense, its time"] == pytest.approx(steps["Dense"] / ratio, abs=1)
