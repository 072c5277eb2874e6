"""Jobs as files: what `altup study run` gives to its processes."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from altup.core.errors import UserError
from altup.finetuning.config import FinetuneConfig
from altup.studies.jobs import (
    LATER_SPEED_FIELDS,
    SPEED_FIELDS,
    Job,
    deciding_fields,
    read_job,
    speed_key,
)
from altup.studies.scale import find_scale
from altup.training.pretraining import PretrainConfig

JOB = Job("finetune", "key", "title", {"config": {}, "of": "other"}, 5, 20, ("other",))


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(asdict(JOB)))
    assert read_job(tmp_path / "job.json") == JOB


@pytest.mark.parametrize(
    "changed",
    [{"kind": "dance"}, {"kind": []}, {"key": None}, {"settings": {}}, {"settings": []}, {"needs": 3}, {"x": 1}],
)
def test_what_is_no_job_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**asdict(JOB), **changed}))
    with pytest.raises(UserError, match="does not describe a"):
        read_job(path)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "{}"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UserError, match="does not describe a job"):
        read_job(tmp_path / "job.json")


def test_a_run_without_its_card_is_not_done(tmp_path: Path) -> None:
    """It was killed after its model and before its card: another life writes it."""
    (JOB.folder(tmp_path) / "final").mkdir(parents=True)
    assert not JOB.is_done(tmp_path)
    (JOB.folder(tmp_path) / "README.md").write_text("")
    assert JOB.is_done(tmp_path)


def test_growth_of_coefficients_is_told_where_it_counts() -> None:
    """Runs from before it was bounded, and those that it does not change, stay known."""

    def told(**changes: Any) -> float | None:
        config = PretrainConfig(**{"data": "data", "optimizer": "muon", "method": "altup", "k": 2, **changes})
        return deciding_fields(config).get("coefficient_growth")

    assert told() == told(method="altup+moe") == told(method="sequence-altup", k=None) == 1
    assert told(coefficient_growth=4.0) == 4
    assert told(coefficient_growth=10.0) is None
    assert told(method="dense", k=None) is told(optimizer="adafactor") is None
    assert told(model_overrides={"coefficients": "dynamic"}) is None
    assert told(model_overrides={"coefficients": "fixed"}, coefficient_growth=4.0) is None
    tuned = FinetuneConfig(model="m", tasks=["glue/rte"], data="d", optimizer="muon")
    assert "coefficient_growth" not in deciding_fields(tuned)
    pulled = {"data": "data", "optimizer": "muon", "coefficient_decay": 4.0}
    assert deciding_fields(PretrainConfig(**pulled, method="altup", k=2))["coefficient_decay"] == 4
    assert "coefficient_decay" not in deciding_fields(PretrainConfig(**pulled, method="dense"))
    fixed = PretrainConfig(**pulled, method="altup", k=2, model_overrides={"coefficients": "fixed"})
    assert "coefficient_decay" not in deciding_fields(fixed)
    assert deciding_fields(replace(tuned, coefficient_decay=4.0))["coefficient_decay"] == 4


def test_what_changes_the_work_of_a_step_has_a_speed_of_its_own() -> None:
    """Else the rows of a study that differ in one of these would show one speed, and equal time go wrong."""
    settings = {**find_scale("long").pretrain, "data": "data", "size": "tiny"}
    changes = [{}, {"noise_density": 0.3}, {"mean_span": 1.0}, {"dropout": 0.1}, {"batch_size": 128},
               {"clip_norm": 1.0}, {"deterministic": True}, {"parallel": "fsdp"}]  # fmt: skip
    assert len({speed_key(PretrainConfig(**{**settings, **c}), 4000, "here") for c in changes}) == len(changes)


def test_of_every_setting_it_is_known_whether_it_changes_the_speed() -> None:
    """A new one belongs into the key of speeds, or here."""
    does_not = {
        *("steps", "lr", "schedule", "warmup_steps", "decay_fraction", "weight_decay", "beta1", "beta2", "recipe"),
        *("lr_factors", "muon_growth", "coefficient_growth", "coefficient_decay", "z_loss", "seed", "data"),
        *(
            "max_skipped",
            "on_spike",
            "watchdog",
            "log_every",
            "eval_every",
            "save_every",
            "keep_last",
            "keep_best",
        ),
        *("trackers", "verify_data", "from_model", "from_seal", "eval_sequences", "eval_part", "batches"),
    }
    in_the_key = {*SPEED_FIELDS, *LATER_SPEED_FIELDS}
    assert in_the_key.isdisjoint(does_not)
    assert in_the_key | does_not == {field.name for field in fields(PretrainConfig)}
