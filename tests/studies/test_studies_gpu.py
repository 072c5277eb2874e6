"""Studies on a GPU: compiled models compared in one process, and runs in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from altup.studies.results import read_results
from altup.studies.run import StudyRun
from altup.studies.scale import find_scale, with_settings
from altup.studies.speed import measure_speed
from altup.studies.study import shipped
from altup.training.pretraining import PretrainConfig
from tests.processes import prepare_text

pytestmark = pytest.mark.gpu


def test_speed_and_memory_of_compiled_models(tmp_path: Path) -> None:
    data = prepare_text(tmp_path)
    models = {"dense": {}, "altup": {"k": 2}, "recycled": {"k": 2}, "sequence-altup": {}, "dense-wide": {"k": 4}}
    configs = {
        method: PretrainConfig(
            data=str(data), size="small", method=method, batch_size=16, inputs_length=256, **names
        )
        for method, names in models.items()
    }
    found = measure_speed(configs, rounds=5, steps=4, generate_batch=4, generate_tokens=8)
    assert found["dense"]["relative_speed"] == 1
    assert found["dense-wide"]["relative_speed"] < 0.8
    for method, measured in found.items():
        assert min(measured["train_seq_per_s"], measured["forward_ms"], measured["generate_ms"]) > 0, method
        weights = 4 * 30e6 / 2**30  # float32, at least
        assert weights < measured["peak_memory"] < 60, method
    assert found["dense-wide"]["peak_memory"] > 1.5 * found["dense"]["peak_memory"]


def test_a_study_in_processes_of_its_own(tmp_path: Path) -> None:
    """Two runs at a time on one GPU, then the comparison of speed, then equal time."""
    data = prepare_text(tmp_path)
    scale = with_settings(find_scale("smoke"), {"steps": 20, "precision": "bf16", "compile": True})
    out = tmp_path / "out"
    run = StudyRun([shipped()["equal-time"], shipped()["sequence"]], scale, out, out / "results", [0], str(data))
    said: list[str] = []
    outcome = run.run(said.append, jobs=2)
    assert outcome.failed == [], said
    metrics = {(r.study, r.label, r.metric): r.value for r in read_results(out / "results")}
    assert metrics["sequence", "Sequence-AltUp", "accuracy"] > 0
    assert metrics["sequence", "Dense", "peak_memory"] > 0
    assert metrics["equal-time", "AltUp K=2", "steps"] > 0
    assert run.run(said.append, jobs=2).finished == 0
