"""Other starts of the coefficients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from altup.core.errors import UserError
from altup.studies.coefficients import STARTERS, begin_with
from altup.studies.queue import do_job
from altup.studies.scale import Scale
from altup.studies.study import STARTS, check_start, shipped
from altup.training.metrics import read_records
from altup.training.pretraining import PretrainConfig
from tests.studies.samples import plan
from tests.training.compare import weights


def test_every_start_that_a_study_may_name_is_there() -> None:
    assert {(name, value) for name, values in STARTS.items() for value in values} == set(STARTERS)


def test_other_starts_change_the_coefficients_and_nothing_else(scale: Scale, data: Path, tmp_path: Path) -> None:
    study = shipped()["initialisation"]
    trials = {trial.label: trial for trial in plan([study], scale, data).trials}
    usual, other = trials["AltUp K=2"].pretrain, trials["g = 1 if active"].pretrain
    assert usual is not None
    assert other is not None
    assert usual.key != other.key
    for name, job in (("usual", usual), ("other", other)):
        config = PretrainConfig.from_dict(job.settings["config"], name)
        begin_with(config, job.settings["start"] or {}, tmp_path / name)
    start = [weights_at(tmp_path / name / "checkpoints/step-0") for name in ("usual", "other")]
    differ = {name for name in start[0] if not torch.equal(start[0][name], start[1][name])}
    assert differ == {name for name in start[0] if name.endswith(".g")}
    assert start[1]["encoder.rule.updates.1.g"].tolist() == [0.0, 1.0]
    assert start[0]["encoder.rule.updates.1.g"].tolist() == [1.0, 1.0]
    assert do_job(other, tmp_path)
    folder = other.folder(tmp_path)
    assert [r["step"] for r in read_records(folder / "metrics.jsonl") if r["split"] == "validation"] == [2, 4]
    learned = weights(folder)["encoder.rule.updates.1.g"]
    assert not torch.equal(learned, start[1]["encoder.rule.updates.1.g"])
    assert (learned - start[1]["encoder.rule.updates.1.g"]).abs().max() < 0.5


def weights_at(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("start", [{"q": "active"}, {"g": "large"}])
def test_unknown_starts_are_refused(start: dict[str, str]) -> None:
    with pytest.raises(UserError, match="not known"):
        check_start(start)
